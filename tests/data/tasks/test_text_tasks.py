"""Tasks in text: what stands in the row, whole and where it should; tokenizers that can't spell it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from task_cases import TOKENIZERS, sentencepiece, task, tokenizer

from lmlab.data.spec import Passkey as PasskeySpec
from lmlab.data.tasks.passkey import Passkey
from lmlab.data.tasks.spelled import FILLER, guessing
from lmlab.errors import ConfigError, DataError
from lmlab.registry import OPTIONS, make

kinds = pytest.mark.parametrize("kind", TOKENIZERS)
TEXT = ("passkey", "needle_text", "vt")


def rows(name: str, kind: str, length: int = 600, n: int = 20, depth: float | None = None, **values: Any) -> list[str]:
    """The whole rows, last target and all."""
    e = task(name, kind, **values).draw(np.random.default_rng(1), n, length, depth)
    ids = np.concatenate([e.inputs_BT, e.targets_BT[:, -1:]], axis=1)
    assert (ids[:, 1:] == e.targets_BT).all()
    return [tokenizer(kind).decode(row) for row in ids.tolist()]


def answers(name: str, kind: str) -> list[str]:
    e = task(name, kind).draw(np.random.default_rng(1), 20, 600)
    return [tokenizer(kind).decode(row[here].tolist()) for row, here in zip(e.targets_BT, e.answers_BT, strict=True)]


@kinds
def test_passkey_reads_as_it_should(kind: str) -> None:
    for text, answer in zip(rows("passkey", kind), answers("passkey", kind), strict=True):
        found = re.fullmatch(
            r"(.*?)The pass key is (\d{5})\. Remember it\.(.*) What is the pass key\? The pass key is (\d{5})", text
        )
        assert found is not None
        before, stated, after, asked = found.groups()
        assert stated == asked == answer.strip()
        sentences = FILLER * 20
        assert sentences.strip().endswith(before.strip()), "what is cut off is at the row's start"
        assert before == "" or before.rstrip().endswith((".",))
        assert sentences.startswith(after), "and at the end of what comes after"


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.8, 1.0])
def test_the_needle_stands_at_its_depth(depth: float) -> None:
    """Of bytes, each a token: depth · filler of them before the needle (and before it the whole of other needles)."""
    for name, values in (("passkey", {}), ("needle_text", {"n_needles": 3})):
        t, said = task(name, **values), r"The pass key is \d+\. Remember it\." if name == "passkey" else ""
        e = t.draw(np.random.default_rng(2), 20, 600, depth)
        for row, reached in zip(e.inputs_BT.tolist(), e.depth_B, strict=True):
            text = tokenizer("byte").decode(row)
            asked = said or r"The number of " + text.split("?")[0].split()[-1] + r" is \d+\."
            needle = re.search(" " + asked, text)
            assert needle is not None
            every = list(re.finditer(r" The (number of \w+|pass key) is \d+\.( Remember it\.)?", text))
            filler = 599 - sum(len(m[0]) for m in every) - len(text[text.index(" What") :])
            before = needle.start() - sum(len(m[0]) for m in every if m.start() < needle.start())
            assert before == int(depth * filler + 0.5)
            assert reached == pytest.approx(before / filler)


@kinds
def test_needle_text_reads_as_it_should(kind: str) -> None:
    for text, answer in zip(rows("needle_text", kind, n_needles=2), answers("needle_text", kind), strict=True):
        said = re.findall(r"The number of (\w+) is (\d\d)\.", text)
        question = re.search(r"What is the number of (\w+)\? The number of (\w+) is (\d\d)$", text)
        assert question is not None
        assert len(said) == len(dict(said)) == 2
        assert question[1] == question[2]
        assert dict(said)[question[1]] == question[3] == answer.strip()


@kinds
def test_vt_reads_as_it_should(kind: str) -> None:
    """By following the chain back from each variable, not forward as the oracle does."""
    for text in rows("vt", kind, n_chains=3, n_hops=3):
        said = re.findall(r"VAR ([A-Z]) = (?:VAR )?(\w+)\.", text)
        question = re.search(r"Which variables are (\d\d)\? They are((?: [A-Z])+)$", text)
        assert question is not None
        assert len(said) == len(dict(said)) == 12
        ends = []
        for name, of in said:
            while of in dict(said):
                of = dict(said)[of]
            ends += [name] if of == question[1] else []
        assert question[2].split() == ends
        assert len(ends) == 4


@kinds
@pytest.mark.parametrize("name", TEXT)
def test_a_row_begins_as_a_document_and_what_counts_is_spelled_as_in_one(kind: str, name: str) -> None:
    spell, e = tokenizer(kind), task(name, kind).draw(np.random.default_rng(3), 10, 400)
    assert (e.inputs_BT[:, 0] == spell.start).all()
    assert not (e.inputs_BT[:, 1:] == spell.eot).any()
    for ids in np.concatenate([e.inputs_BT, e.targets_BT[:, -1:]], axis=1).tolist():
        text = spell.decode(ids)
        asks = text[text.index(next(q for q in (" What is", " Which") if q in text)) :]
        stated = re.findall(r" (?:The pass|The number|VAR) [^?]*?\d\.|$", text)[0]
        for said in (asks, stated):
            canonical = spell.encode("." + said)[len(spell.encode(".")) :]
            assert any(ids[i : i + len(canonical)] == canonical for i in range(len(ids)))


def lower() -> Any:
    from tokenizers import normalizers

    return sentencepiece(normalizers.Lowercase())


def no_digits() -> Any:
    from tokenizers import normalizers

    return sentencepiece(normalizers.Replace("7", ""))


@pytest.mark.parametrize("name", TEXT)
@pytest.mark.parametrize("made", [lower, no_digits], ids=lambda f: f.__name__)
def test_a_tokenizer_that_can_not_spell_it_is_refused(name: str, made: Callable[[], Any]) -> None:
    with pytest.raises(DataError, match=f"`data={name}`: the tokenizer can't spell ") as caught:
        make(OPTIONS["data"][name](), made())
    assert "tokenizer=byte" in caught.value.hint


@pytest.mark.parametrize("name", TEXT)
def test_text_without_a_tokenizer_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        make(OPTIONS["data"][name]())


def test_more_variables_than_letters_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`data.n_chains` 9 with `data.n_hops` 2 needs 27 variables") as caught:
        task("vt", n_chains=9)
    assert "data.n_hops to at most 1" in caught.value.hint


def test_each_digit_is_a_token_of_bytes() -> None:
    t = Passkey(PasskeySpec(digits=3), tokenizer("byte"))
    e = t.draw(np.random.default_rng(0), 5, 120)
    assert (e.answers_BT.sum(1) == 3).all()
    assert t.chance(120) == pytest.approx((0.1, 1e-3))


def test_guessing_by_hand() -> None:
    """ab, ac, d: first token right with 2/3, 2/3, 1/3; then b or c with 1/2: (5/3 + 1) / 5."""
    spelled = [np.array(ids) for ids in ([1, 2], [1, 3], [4])]
    assert guessing(spelled) == pytest.approx(((5 / 3 + 1) / 5, 1 / 3))
    assert guessing(spelled, 2).exact == pytest.approx(1 / 9)
