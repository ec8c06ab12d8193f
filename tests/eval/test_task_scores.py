"""Scores of tasks: an oracle as a model, all logits by brute force, intervals by another library's figures."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lmlab.config.tree  # noqa: F401  # fills OPTIONS
from lmlab.data.spec import Byte, Mqar, Needle, Passkey
from lmlab.data.tasks import split as splits
from lmlab.data.tasks.base import Task
from lmlab.data.tokenizer import byte_tokenizer
from lmlab.errors import ConfigError
from lmlab.eval.long.lengths import area, effective_length, largest, score_summary
from lmlab.eval.task_scores import Score, score, task_cells
from lmlab.registry import make
from lmlab.runs.intervals import wilson
from tests.composed import VOCAB, model, peaked


def mqar(vocab_size: int = VOCAB) -> Any:
    return make(Mqar(n_pairs=3, vocab_size=vocab_size))


def passkey() -> Any:
    return make(Passkey(), byte_tokenizer(Byte()))


class Answers(nn.Module):
    """A model that predicts what it is told to: wrong(inputs, predictions) edits an oracle's."""

    def __init__(self, task: Task, wrong: Any = lambda inputs, found: found, uniform: bool = False) -> None:
        super().__init__()
        self.routed = False
        self.embed, self.dims = nn.Embedding(1, 1), SimpleNamespace(vocab_size=task.vocab_size)
        self.task, self.wrong, self.scale = task, wrong, 0.0 if uniform else 30.0

    def eager(self) -> Any:
        return nullcontext()

    def known_failures(self) -> dict[str, str]:
        return {}

    def hidden(self, tokens_BT: Tensor, positions_BT: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        inputs = tokens_BT.numpy()
        found = self.wrong(inputs, self.task.oracle(inputs))
        return torch.nn.functional.one_hot(torch.from_numpy(found), self.task.vocab_size).double(), ()

    def logits(self, x_BTD: Tensor) -> Tensor:
        return x_BTD * self.scale


def test_an_oracle_scores_all_and_loses_nothing() -> None:
    for task, length in ((mqar(), 64), (passkey(), 128)):
        found = score(Answers(task), task.draw(np.random.default_rng(0), 40, length))  # type: ignore[arg-type]
        assert (found.n, found.correct, found.token_correct) == (40, 40, found.token_n)
        assert found.token_n == 40 * (3 if task.vocab_size == VOCAB else 5)
        assert found.nats == pytest.approx(0, abs=1e-6)


def test_an_example_counts_when_every_answer_is_right() -> None:
    """The last digit always wrong: no passkey right, four of five digits."""

    def last_wrong(inputs: np.ndarray, found: np.ndarray) -> np.ndarray:
        found[:, -1] = 0
        return found

    task = passkey()
    made = score(Answers(task, last_wrong), task.draw(np.random.default_rng(0), 30, 128))  # type: ignore[arg-type]
    assert made == Score(30, 0, 150, 120, made.nats)
    assert made.nats == pytest.approx(30 * 30, rel=1e-6), "30 wrong tokens, each 30 nats below the predicted one"


def test_a_uniform_model_has_the_vocabularys_loss() -> None:
    task = mqar()
    found = score(Answers(task, uniform=True), task.draw(np.random.default_rng(0), 20, 64))  # type: ignore[arg-type]
    assert found.nats / found.token_n == pytest.approx(math.log(VOCAB))


@pytest.mark.parametrize("batch_tokens", [1, 100, 10_000])
def test_scores_are_those_of_all_logits(batch_tokens: int) -> None:
    """Of a composed model in float64, by softmax and argmax of every position."""
    task, net = mqar(), peaked(model())
    net.double().train()
    e = task.draw(np.random.default_rng(1), 50, 24)
    with torch.no_grad():
        positions = torch.arange(24).expand(50, 24)
        logits = net.eval()(torch.from_numpy(e.inputs_BT), positions).logits_BTV
    net.train()
    e.targets_BT[:20] = logits[:20].argmax(-1)
    e.targets_BT[:30, 12:] = logits[:30, 12:].argmax(-1)
    log_p, hits = logits.log_softmax(-1).numpy(), logits.argmax(-1).numpy() == e.targets_BT
    nats = -sum(log_p[b, t, e.targets_BT[b, t]] for b, t in zip(*np.nonzero(e.answers_BT), strict=True))
    found = score(net, e, batch_tokens)
    assert (found.n, found.token_n) == (50, 150)
    assert found.token_correct == hits[e.answers_BT].sum()
    assert found.correct == (hits | ~e.answers_BT).all(1).sum()
    assert 20 <= found.correct < found.token_correct / 3 < 50, "some rows, and single tokens of others"
    assert found.nats == pytest.approx(nats, rel=1e-10)
    assert net.training, "as it was"


@pytest.mark.parametrize(
    ("correct", "n", "expected"),
    [  # scipy.stats.binomtest(correct, n).proportion_ci(method="wilson"), whose z is 1.959964
        (93, 100, (0.862504852609, 0.965680738933)),
        (0, 10, (0.0, 0.277532799863)),
        (10, 10, (0.722467200137, 1.0)),
        (1, 2, (0.094531205734, 0.905468794266)),
        (5, 1000, (0.002137535527, 0.011650955373)),
    ],
)
def test_wilson(correct: int, n: int, expected: tuple[float, float]) -> None:
    assert wilson(correct, n, 1.959963984540054) == pytest.approx(expected, abs=1e-9)
    assert wilson(correct, n) == pytest.approx(expected, abs=1e-5)


def test_wilson_of_nothing_says_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


# ---------------------------------------------------------------- cells


def test_cells_by_length_and_depth() -> None:
    """Right only where the needle stands in the last 150 tokens."""

    def near(inputs: np.ndarray, found: np.ndarray) -> np.ndarray:
        text = [bytes(row[row < 256].astype(np.uint8).tolist()) for row in inputs]
        at = np.array([t.index(b" The pass key") for t in text])
        found[inputs.shape[1] - at > 150] = 0
        return found

    task = passkey()
    cells = task_cells(task, Answers(task, near), [40, 128, 512], [0.0, 0.5, 1.0], 10, name="passkey")  # type: ignore[arg-type]
    assert [cell["length"] for cell in cells] == [40, 128, 512]
    assert "needs 80 tokens, rows have 40" in cells[0]["not_available"]
    assert "exact" not in cells[0]
    assert (cells[1]["n"], cells[1]["correct"], cells[1]["exact"], cells[1]["exact_high"]) == (10, 10, 1.0, 1.0)
    assert cells[2]["depths"] == [
        {"depth": 0.0, "n": 4, "correct": 0},
        {"depth": 0.5, "n": 3, "correct": 0},
        {"depth": 1.0, "n": 3, "correct": 3},
    ]
    assert (cells[2]["exact"], cells[2]["token_n"]) == (0.3, 50)
    assert (cells[2]["exact_low"], cells[2]["exact_high"]) == wilson(3, 10)
    assert (cells[2]["chance_exact"], cells[2]["chance_token"]) == pytest.approx((1e-5, 0.1))
    assert cells[2]["scaling"] == "own"
    assert cells[2]["factor"] is None


def test_cells_of_a_task_without_depth() -> None:
    task = mqar()
    (cell,) = task_cells(task, Answers(task), [64], [0.0, 1.0], 8, name="mqar", scaling="pi", factor=2.0)  # type: ignore[arg-type]
    assert cell["depths"] == []
    assert (cell["n"], cell["scaling"], cell["factor"], cell["loss"]) == (8, "pi", 2.0, pytest.approx(0, abs=1e-6))


def test_every_model_is_asked_the_same() -> None:
    task = passkey()
    seen: list[np.ndarray] = []

    def look(inputs: np.ndarray, found: np.ndarray) -> np.ndarray:
        seen.append(inputs)
        return found

    for _ in range(2):
        task_cells(task, Answers(task, look), [128], [0.2, 0.8], 6, name="passkey")  # type: ignore[arg-type]
    assert len(seen) == 4
    assert (seen[0] == seen[2]).all()
    assert (seen[1] == seen[3]).all()
    assert not (seen[0] == seen[1]).all(1).any()


def test_more_ids_than_the_model_reads_are_refused() -> None:
    task = make(Needle(vocab_size=512))
    with pytest.raises(ConfigError, match=f"has 512 ids, the model reads {VOCAB}") as caught:
        task_cells(task, model(), [64], [], 4, name="needle")
    assert f"at most {VOCAB}" in caught.value.hint


def test_a_length_that_positions_lack_is_not_available() -> None:
    task, net = mqar(), model(pos="learned")
    short, long = net.dims.seq_len, 2 * net.dims.seq_len
    cells = task_cells(task, net, [short, long], [], 4, name="mqar")
    assert cells[0]["not_available"] is None
    assert cells[1]["not_available"]
    assert "exact" not in cells[1]


def test_how_far_a_score_holds() -> None:
    told = score_summary({64: (100, 100, 0.01), 128: (90, 100, 0.01), 256: (30, 100, 0.01)}, 64)
    assert (told["effective_length"], told["largest_80"], told["k_max"]) == (128, 128, 256)
    assert (told["trained_score"], told["chance"], told["above_chance"]) == (1.0, 0.01, True)
    assert told["area"] == pytest.approx((0.95 + 0.6) / 2)


def test_a_score_at_chance_holds_nowhere() -> None:
    told = score_summary({64: (12, 100, 0.1), 128: (12, 100, 0.1)}, 64)
    assert not told["above_chance"]
    assert told["effective_length"] is None
    assert score_summary({64: (20, 100, 0.1), 128: (18, 100, 0.1)}, 64)["effective_length"] == 128
    assert score_summary({64: (30, 100, 0.25)}, 64)["k_max"] is None, "0.2 is below chance"
    assert score_summary({128: (100, 100, 0.1)}, 64)["effective_length"] is None, "nothing at the trained length"


# ---------------------------------------------------------------- by length


def test_effective_length_is_of_the_trained_score() -> None:
    scores = {64: 0.8, 128: 0.68, 256: 0.679, 512: 0.1}
    assert effective_length(scores, 64) == 128
    assert effective_length({64: 0.0, 128: 0.0}, 64) is None
    assert effective_length({128: 1.0}, 64) is None, "no score at the trained length"


def test_largest_and_area_by_hand() -> None:
    scores = {256: 0.2, 64: 1.0, 128: 0.8}
    assert largest(scores, 0.8) == 128
    assert largest(scores, 0.2) == 256
    assert largest(scores, 1.1) is None
    assert area(scores) == pytest.approx((0.9 + 0.5) / 2)
    assert area({64: 1.0, 256: 0.0}) == pytest.approx(0.5)
    assert area({64: 1.0}) is None


def test_copies_of_an_example_count_once() -> None:
    """Of one digit there are ten passkeys at a depth, fewer of them in val."""
    task = make(Passkey(digits=1), byte_tokenizer(Byte()))
    found = splits.draw(task, "val", 0, 0, 40, 200, 0.5)
    one_each = splits.distinct(found)
    rows = {row.tobytes() for row in found.inputs_BT}
    assert len(one_each.inputs_BT) == len(rows) < 10
    cells = task_cells(task, model(torch.float32, vocab=257), [200], [0.0, 0.25, 0.5, 0.75, 1.0], 200, name="passkey")
    assert cells[0]["not_available"] is None
    assert cells[0]["n"] == sum(one["n"] for one in cells[0]["depths"]) < 50
    assert all(one["n"] for one in cells[0]["depths"])
