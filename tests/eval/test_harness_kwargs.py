"""What a task asks of generation: lm_eval's meanings, and refusals by name."""

from __future__ import annotations

import pytest

from lmlab.errors import ConfigError
from lmlab.eval.harness_kwargs import asked, cut
from lmlab.generate.sampling import Sampling


def test_nothing_said_is_greedy_and_256_tokens():
    found = asked({}, 1024)
    assert (found.until, found.max_new, found.sampling) == ((), 256, Sampling())


def test_what_lm_eval_says_is_read():
    found = asked({"until": "\n", "max_new_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 5}, 64)
    assert (found.until, found.max_new) == (("\n",), 9)
    assert found.sampling == Sampling(0.7, 5, 0.9)
    assert asked({"until": ["a", ""], "max_gen_toks": 1}, 64).until == ("a",)


@pytest.mark.parametrize("kwargs", [{"do_sample": False, "temperature": 0.7}, {"temperature": 0.0, "top_k": 3}])
def test_greedy_is_greedy(kwargs):
    assert asked({"max_gen_toks": 4, **kwargs}, 64).sampling == Sampling()


def test_equal_requests_have_random_numbers_of_their_own():
    found = asked({"temperature": 1.0, "max_gen_toks": 4}, 64)
    assert found.seeded(0, 0) == Sampling(1.0)
    assert len({found.seeded(seed, copy).seed for seed in range(3) for copy in range(3)}) == 9


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_beams": 4}, "generation_kwargs.num_beams is 4: lmlab's generation has no such setting"),
        ({"until": 3}, "generation_kwargs.until is 3: it is no list of texts"),
        ({"until": [3]}, "it is no list of texts"),
        ({"max_gen_toks": 0}, "generation_kwargs.max_gen_toks is 0: it is no number of tokens"),
        ({"max_tokens": "8"}, "generation_kwargs.max_tokens is '8'"),
        ({"max_gen_toks": 64}, "generation_kwargs.max_gen_toks is 64, the model's rows have 64 tokens"),
        ({}, "generation_kwargs.max_gen_toks is 256 by default, the model's rows have 64 tokens"),
        ({"max_gen_toks": 4, "max_tokens": 5}, "generation_kwargs say max_gen_toks 4, max_tokens 5"),
        ({"max_gen_toks": 4, "do_sample": True}, "do_sample true at temperature 0"),
        ({"max_gen_toks": 4, "do_sample": "yes"}, "it is neither true nor false"),
        ({"max_gen_toks": 4, "temperature": -1}, "generation_kwargs.temperature is -1: it is below 0"),
        ({"max_gen_toks": 4, "temperature": "hot"}, "it is no number"),
        ({"max_gen_toks": 4, "top_p": 0}, "generation_kwargs.top_p is 0: it is no share"),
        ({"max_gen_toks": 4, "top_k": -1}, "generation_kwargs.top_k is -1"),
    ],
)
def test_what_can_not_be_done_is_refused_by_name(kwargs, message):
    with pytest.raises(ConfigError) as caught:
        asked(kwargs, 64)
    assert message in caught.value.message
    assert caught.value.hint


def test_the_first_stop_string_ends_the_text():
    assert cut("one. two\nthree", ["\n", "."]) == "one"
    assert cut("one", ["\n"]) == "one"
    assert cut("\none", ["\n"]) == ""
