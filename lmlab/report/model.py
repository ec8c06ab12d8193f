"""What a report is made of: runs, arms (runs that differ only in their seeds), figures, curves. Plain values, no torch.

`collect` fills Run, `arms` groups them, `confounds` and `curves` look at them; every output (terminal, Markdown, page,
CSV, JSON, figures) is written from the one Report and computes nothing of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

BPB, LOSS, TRAIN_LOSS = "val/bits_per_byte", "val/loss", "train/loss"
X_AXES = ("tokens", "flops", "elapsed_s")


@dataclass
class Run:
    """One run as its files tell it, or one that a sweep planned and nobody began (path None, state "planned")."""

    name: str
    path: Path | None
    state: str  # planned missing created running finished diverged failed stopped interrupted unreadable
    config: dict[str, Any]  # identity keys only, flat, as users type them; without seeds
    seeds: dict[str, int | None]  # all, init, data, dropout
    manifest: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)  # the manifest's: figures of the end
    rows: dict[str, np.ndarray] = field(default_factory=dict)  # a float column per metric, NaN where a row has none
    lists: dict[str, list[float]] = field(default_factory=dict)  # the last of each metric that is a list of numbers
    problems: list[str] = field(default_factory=list)  # damaged or non-finite lines, unreadable files: named, counted
    error: str | None = None  # why it failed, one line
    plugins: dict[str, str] = field(default_factory=dict)  # file name → hash of the run's own plug-ins
    edited: bool = False  # config.yaml no longer fits the hash in the directory's name
    long_context: dict[str, Any] | None = None  # the newest eval/*-long-context.json of its last checkpoint
    long_other: str = ""  # why an evaluation that is there is not that one


@dataclass(frozen=True)
class Stat:
    """A mean over seeds. sd is the sample standard deviation, None below two values."""

    mean: float
    sd: float | None
    n: int


@dataclass(frozen=True)
class Delta:
    """Arm minus baseline. sd: of the differences when `paired` (same seeds in both), None below two pairs. `why` says
    why there is none (other validation text, nothing finished), and mean is then None."""

    mean: float | None
    sd: float | None = None
    n: int = 0
    paired: bool = False
    why: str = ""


@dataclass
class Arm:
    """Runs of one composition. `values`: of each axis that differs in the report; label: `norm=rmsnorm pos=rope`."""

    label: str
    values: dict[str, Any]
    config: dict[str, Any]
    runs: list[Run]
    is_baseline: bool = False
    stats: dict[str, Stat] = field(default_factory=dict)  # val/bits_per_byte, val/loss, test/…, tokens_per_s, …
    delta: Delta | None = None  # of val/bits_per_byte; None for the baseline itself
    facts: dict[str, Any] = field(default_factory=dict)  # parameters, active_parameters, noncausal (why), tokens, …

    @property
    def states(self) -> dict[str, int]:
        """How many runs are in each state."""
        counted: dict[str, int] = {}
        for run in self.runs:
            counted[run.state] = counted.get(run.state, 0) + 1
        return counted


@dataclass(frozen=True)
class Curve:
    """One metric of one arm against one axis: the mean over seeds and the lowest and highest seed at each point."""

    arm: int  # index into Report.arms
    metric: str
    x_name: str  # one of X_AXES
    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    n: int  # seeds
    size: float | None = None  # tokens of val the points were measured on; None for all of val, and where not known


@dataclass(frozen=True)
class Column:
    """`key` names it in CSV and JSON, `title` elsewhere; `help` is one sentence."""

    key: str
    title: str
    numeric: bool = False
    help: str = ""


@dataclass(frozen=True)
class Cell:
    """`text` is shown (– for missing), `value` is the number or word behind it: for sorting, CSV and JSON."""

    text: str
    value: float | int | str | None = None
    mark: str = ""  # "", "baseline", "warn", "bad", "lower", "higher": how an output may colour it


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns; `name` is `arms` or `runs`."""

    name: str
    columns: tuple[Column, ...]
    rows: list[list[Cell]]


@dataclass(frozen=True)
class Why:
    """What probes found inside the models: at the last step probed, over layers. Empty parts are left out."""

    table: Table  # figure by figure, a row per arm
    findings: list[str]  # what is out of the ordinary, with the arm and the figure
    notes: list[str]  # arms without probes, other steps
    profiles: list[Curve]  # figures against the layer: x_name is `layer`, metric the figure


@dataclass(frozen=True)
class Load:
    """How the choices of one layer fell on its experts, from the busiest to the idlest: over the mean; of all seeds the
    mean."""

    arm: int  # index into Report.arms
    layer: int
    over_mean: list[float]
    n: int  # seeds


@dataclass(frozen=True)
class Routing:
    """Where tokens went in arms that have experts. Empty parts are left out."""

    table: Table  # a row per arm and layer, at the last evaluation of val
    findings: list[str]  # experts that nobody chose, choices that found no room
    notes: list[str]  # arms of which nothing is known, other steps
    loads: list[Load]
    curves: list[Curve]  # of training steps: x_name is `step`, metric one of lmlab/report/routing.py's OVER_TIME


@dataclass(frozen=True)
class LongLine:
    """One figure of one arm under one scaling, or of a paper (arm None), against length, position or length over the
    trained one: the mean over seeds and the lowest and highest seed at each point."""

    figure: str  # perplexity, sliding_perplexity, position, ratio, score/<needle, copy or a task's name>
    arm: int | None  # index into Report.arms
    scaling: str  # own (as trained), none, pi …
    name: str  # `pos=rope · pi`
    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    n: int  # seeds
    trained: int | None = None  # tokens of the rows it was trained on
    chance: float | None = None  # of a score
    length: int | None = None  # of the windows whose positions are drawn
    source: str = ""  # who published it, on what
    like: tuple[int, str] | None = None  # (arm, scaling) that a published line is set beside


@dataclass(frozen=True)
class DepthMap:
    """How often an answer was found by length and by depth, over all seeds. A row per depth; n 0 where not measured."""

    what: str  # needle, or a task's name
    arm: int
    scaling: str
    name: str
    trained: int
    lengths: list[int]
    depths: list[float]  # 0 is the beginning
    correct: list[list[int]]
    n: list[list[int]]


@dataclass(frozen=True)
class LongContext:
    """What becomes of the arms beyond the length they were trained on. Empty parts are left out."""

    tables: list[Table]  # long_scores, long_text, long_speed: those that have rows
    short: Table  # perplexities with a column per length
    findings: list[str]
    notes: list[str]  # what does not compare, who has no evaluation, what is not available
    unlike: str  # why lines of arms do not compare, in a few words; "" where they do
    lines: list[LongLine]
    maps: list[DepthMap]


@dataclass
class Report:
    """Everything an output needs. `axes`: keys that differ between the arms, and only those."""

    title: str
    source: str  # the sweep or folder it was made from
    made: str  # when, UTC
    axes: list[str]
    arms: list[Arm]
    baseline: int | None
    tables: list[Table]  # arms, then runs
    confounds: list[str]  # each one line
    notes: list[str]  # damaged lines, runs left out, what ± means
    curves: list[Curve]
    common: dict[str, Any] = field(default_factory=dict)  # what all arms share, of what differs from the default
    why: Why | None = None  # None where no run was probed
    routing: Routing | None = None  # None where no arm has experts
    long_context: LongContext | None = None  # None where no run was evaluated so
