"""Words beside a drawing: which part of val, which tokenizers, which arms."""

from __future__ import annotations

from typing import Any

import pytest

from lmlab.report.captions import OTHER_TEXT, UNLIKE, above_the_frame, part_of_val, unfinished, warning
from lmlab.report.curve_svg import Frame
from lmlab.report.model import BPB, TRAIN_LOSS, Arm, Curve, Report, Run


def made(*arms: Arm) -> Report:
    return Report("t", "runs", "now", [], list(arms), 0, [], [], [], [])


def arm(label: str = "a", *states: str, **config: Any) -> Arm:
    runs = [Run(f"{label}-{i}", None, state, {}, {}) for i, state in enumerate(states or ("finished",))]
    return Arm(label, {}, {key.replace("_", ".", 1): value for key, value in config.items()}, runs)


def curve(arm: int, size: float | None = None, metric: str = BPB) -> Curve:
    return Curve(arm, metric, "tokens", [1.0], [1.0], [1.0], [1.0], 1, size=size)


PARTS = {
    "a part": ([32_768.0, 32_768.0], "on the first 32,768 tokens of val"),
    "all, or not known": ([None, None], ""),
    "two parts": ([32_768.0, 16_384.0], "on the first 16,384 to 32,768 tokens of val"),
    "one of both": ([32_768.0, None], "on the first 32,768 tokens of val in 1 of 2 arms"),
}


@pytest.mark.parametrize("case", PARTS)
def test_part_of_val(case: str) -> None:
    sizes, words = PARTS[case]
    assert part_of_val(made(arm(), arm()), [curve(i, size) for i, size in enumerate(sizes)]) == words


def test_of_an_arm_that_did_not_finish_the_part_of_val_does_not_count_unless_none_did() -> None:
    curves, words = [curve(0, 32_768.0), curve(1)], "on the first 32,768 tokens of val"
    assert part_of_val(made(arm(), arm("b", "diverged")), curves) == words
    assert part_of_val(made(arm("a", "stopped"), arm("b", "stopped")), curves) == f"{words} in 1 of 2 arms"


def test_training_loss_is_on_no_part_of_val() -> None:
    assert part_of_val(made(arm()), [curve(0, 10.0, TRAIN_LOSS)]) == ""


def warned(*arms: Arm, metric: str = TRAIN_LOSS, size: float | None = None) -> str:
    return warning(made(*arms), [curve(i, size, metric) for i in range(len(arms))])


def test_loss_per_token_of_other_tokenizers_is_warned_of_and_bits_per_byte_of_a_part_of_val() -> None:
    small, large = arm(tokenizer_vocab_size=1024), arm(tokenizer_vocab_size=4096)
    assert warned(small, large) == UNLIKE
    assert warned(small, large, metric=BPB) == ""
    assert warned(small, large, metric=BPB, size=32_768.0) == OTHER_TEXT
    assert warned(small, small) == warned(small, small, metric=BPB, size=32_768.0) == ""


def test_tokenizers_are_told_apart_by_their_hash_else_by_their_options() -> None:
    # The same options on other data make another tokenizer, and only the hash tells.
    one, other, unknown = (arm(tokenizer="bpe") for _ in range(3))
    one.runs[0].manifest, other.runs[0].manifest = {"tokenizer_hash": "aa"}, {"tokenizer_hash": "bb"}
    assert warned(one, other) == UNLIKE
    assert warned(one, unknown) == ""


@pytest.mark.parametrize(
    ("states", "words"),
    [
        (("finished", "diverged"), ""),
        (("diverged", "diverged"), "diverged"),
        (("stopped", "diverged", "planned"), "stopped, diverged and planned"),
    ],
)
def test_unfinished(states: tuple[str, ...], words: str) -> None:
    assert unfinished(arm("a", *states)) == words


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        ((), ""),
        ((1,), "b ends above the frame"),
        ((0, 2), "a and c end above the frame"),
        ((0, 1, 2), "a, b and c end above the frame"),
        ((0, 1, 2, 3, 4), "a, b, c and 2 more end above the frame"),
    ],
)
def test_arms_above_the_frame_are_named(cut: tuple[int, ...], words: str) -> None:
    assert above_the_frame(made(*map(arm, "abcde")), Frame(0, 1, 0, 1, cut)) == words
