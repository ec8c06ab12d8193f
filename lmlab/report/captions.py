"""What is said with a drawing, on the page and in figures: which part of val its points are measured on, arms whose
losses do not compare, arms that did not finish, arms that end above the frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lmlab.report.axes import canonical
from lmlab.report.curve_svg import Frame
from lmlab.report.facts import tokenizer_id
from lmlab.report.model import BPB, LOSS, TRAIN_LOSS, Arm, Curve, Report
from lmlab.runs.noncausal import NOT_CAUSAL

NAMED = 3  # arms that are named; of more than that, how many more
UNLIKE = "nats per token: arms with another tokenizer do not compare"
OTHER_TEXT = "of another tokenizer so many tokens are another part of val"


def and_(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def part_of_val(report: Report, curves: Sequence[Curve]) -> str:
    """`on the first 32,768 tokens of val`, where the curves of val are on a part of it; "" where they are on all.

    Of an arm that did not finish it is not known how much all of val is, so the finished ones tell.
    """
    if curves[0].metric not in (BPB, LOSS):
        return ""
    sizes = [curve.size for curve in curves if not unfinished(report.arms[curve.arm])]
    sizes = sizes or [curve.size for curve in curves]
    parts = [size for size in sizes if size is not None]
    if not parts:
        return ""
    said = " to ".join(f"{size:,.0f}" for size in dict.fromkeys((min(parts), max(parts))))
    where = "" if len(parts) == len(sizes) else f" in {len(parts)} of {len(sizes)} arms"
    return f"on the first {said} tokens of val{where}"


def warning(report: Report, curves: Sequence[Curve]) -> str:
    """Why lines do not compare, or not quite: of arms that are not causal, or that cut text into tokens in different
    ways; "" where they do."""
    return "; ".join(words for words in (_see_later(report, curves), _cut_otherwise(report, curves)) if words)


def _see_later(report: Report, curves: Sequence[Curve]) -> str:
    """`A is not causal: its tokens see later ones`."""
    arms = [report.arms[curve.arm] for curve in curves]
    names = [arm.label for arm in arms if not_causal(arm)]
    if not names or curves[0].metric not in (BPB, LOSS, TRAIN_LOSS):
        return ""
    more = len(names) - NAMED
    names = names[:NAMED] + ([f"{more} more"] if more > 0 else [])
    return f"{and_(names)} {'are' if len(names) > 1 else 'is'} not causal: tokens see later ones"


def not_causal(arm: Arm) -> str:
    """`not causal`, or "" of any other arm."""
    return NOT_CAUSAL if arm.facts.get("noncausal") else ""


def _cut_otherwise(report: Report, curves: Sequence[Curve]) -> str:
    if not _tokenizers_differ([report.arms[curve.arm] for curve in curves]):
        return ""
    if curves[0].metric in (LOSS, TRAIN_LOSS):
        return UNLIKE
    return OTHER_TEXT if part_of_val(report, curves) else ""


def _tokenizers_differ(arms: Sequence[Arm]) -> bool:
    """By their hashes; while one is not known, by the options chosen."""
    known = [next((found for run in arm.runs if (found := tokenizer_id(run))), None) for arm in arms]
    return len(set(known if None not in known else map(_chosen_tokenizer, arms))) > 1


def _chosen_tokenizer(arm: Arm) -> str:
    return canonical({key: value for key, value in arm.config.items() if key.partition(".")[0] == "tokenizer"})


def unfinished(arm: Arm) -> str:
    """Of an arm without a finished run the states of its runs, in words; "" of any other."""
    return "" if not arm.runs or "finished" in arm.states else and_(arm.states)


def above_the_frame(report: Report, shown: Frame) -> str:
    """`A, B and C end above the frame`; "" when all arms end within it."""
    if not shown.cut:
        return ""
    names = [report.arms[i].label for i in shown.cut[:NAMED]]
    more = len(shown.cut) - NAMED
    names += [f"{more} more"] if more > 0 else []
    return f"{and_(names)} {'end' if len(names) > 1 else 'ends'} above the frame"
