"""Every option of every model group, every pair of options of two groups, and every choice of a field beside every
option, each with its rows, over processes.

Each option is composed once; the rest is put together from parts. What a row of lmlab/compat/rules.py refuses is
counted with that row. Alone an option gets every row and its dead flags, in a pair the rows that are quick, beside a
choice of a field those that stand before a training. Of these two, rows about attention by itself are asked only where
both sides are attention's, and a few that the formulas answer too only where these are not met to the last digits.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple, Optional

import torch

from lmlab.check.all_rows import IMPLIED, QUICK, ROWS, asked
from lmlab.check.choices import Parts, choices, with_options
from lmlab.check.flags import Planned, dead_flags
from lmlab.check.rows import Row, attempted
from lmlab.compat import rules
from lmlab.config.catalogue import defaults, entries, user_conf
from lmlab.config.load import load
from lmlab.config.tree import Experiment

GROUPS = ("norm", "block", "pos", "rope_scaling", "attn", "ffn", "moe")
CHUNK = 8
ATTENTION = ("pos", "rope_scaling", "attn")  # the groups that make attention
OF_ATTENTION = ("causality by layer", "causality in training by layer", "backends agree")
SLOW = ("loss at step 0", "parameters and FLOPs")  # not asked of a pair
PAIR = tuple(name for name in ROWS if name not in SLOW)
BRIEF = tuple(QUICK)  # of a choice beside an option


class Outcome(NamedTuple):
    """One composition: its failed and known rows, or the rule that refuses it."""

    what: str
    failed: tuple[Row, ...] = ()
    known: tuple[Row, ...] = ()
    refused: str = ""

    def told(self) -> tuple[Row, ...]:
        return (*self.failed, *self.known)


class Task(NamedTuple):
    what: str
    words: Optional[tuple[str, ...]]  # what composes it on the command line; None when it is put together
    experiment: Experiment
    config_dir: Optional[str]
    planned: Planned
    rows: tuple[str, ...]


def run(
    words: Sequence[str], planned: Planned, config_dir: Optional[str] = None, workers: Optional[int] = None
) -> Iterator[Outcome]:
    """The outcomes, options alone first. words: what all compositions have in common; planned: a function of a module,
    see lmlab/check/flags.py."""
    base = load(words, config_dir=config_dir).experiment
    tasks = []
    for what, typed, experiment, rows in compositions(base, words, config_dir):
        if rule := refusal(experiment):
            yield Outcome(what, refused=rule)
        else:
            tasks.append(Task(what, typed, experiment, config_dir, planned, rows))
    yield from _over_processes(tasks, workers or os.cpu_count() or 1)


Composition = tuple[str, Optional[tuple[str, ...]], Experiment, tuple[str, ...]]


def compositions(base: Experiment, words: Sequence[str], config_dir: Optional[str] = None) -> Iterator[Composition]:
    """(name, words that compose it, experiment, its rows): the base, every option alone, every pair of options of two
    groups, every choice of a field beside every option."""
    user = user_conf(config_dir)
    parts = {g: {label: entry.make() for label, entry in sorted(entries(g, user).items())} for g in GROUPS}
    others = {g: [(label, part) for label, part in parts[g].items() if label != defaults()[g]] for g in GROUPS}
    every = tuple(ROWS)
    chosen: dict[str, Any]
    yield "the base", tuple(words), base, every
    for group in GROUPS:
        for label, part in others[group]:
            chosen = {group: part}
            yield f"{group}={label}", (*words, f"{group}={label}"), dataclasses.replace(base, **chosen), every
    for one, two in itertools.combinations(GROUPS, 2):
        for (a, part_a), (b, part_b) in itertools.product(others[one], others[two]):
            chosen = {one: part_a, two: part_b}
            yield f"{one}={a} {two}={b}", None, dataclasses.replace(base, **chosen), between(PAIR, one, two)
    with_sizes: Parts = {**parts, "model": {"": base.model}}
    for choice in choices(with_sizes):
        for what, group, experiment in with_options(choice, base, with_sizes):
            yield what, None, experiment, between(BRIEF, choice.group, group)


def between(rows: tuple[str, ...], one: str, two: str) -> tuple[str, ...]:
    """Those of the rows that may come out otherwise for two groups together than for each alone."""
    return rows if {one, two} <= {*ATTENTION} else tuple(name for name in rows if name not in OF_ATTENTION)


def refusal(experiment: Experiment) -> str:
    """The id of the first rule that the experiment breaks, or nothing."""
    if not rules.check(experiment):
        return ""
    return next((rule.id for rule in rules.RULES if rule.find(experiment)), "incomplete")


def _over_processes(tasks: list[Task], workers: int) -> Iterator[Outcome]:
    """Started anew, each on one thread: a fork would share torch's."""
    context = multiprocessing.get_context("spawn")
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            yield from pool.map(answer, tasks, chunksize=CHUNK)
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def answer(task: Task) -> Outcome:
    """The rows of one composition, in a worker."""
    torch.set_num_threads(1)
    alone = task.words is not None
    rows = asked(task.experiment, {name: ROWS[name] for name in task.rows}, () if alone else IMPLIED)
    if task.words is not None:
        words, config_dir = task.words, task.config_dir
        rows.append(attempted("dead flags", lambda: dead_flags(words, task.experiment, task.planned, config_dir)))
    return Outcome(task.what, tuple(r for r in rows if r.state == "fail"), tuple(r for r in rows if r.state == "known"))
