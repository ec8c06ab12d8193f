"""A made-up report with everything an output must cope with: a diverged arm, a run nobody began, a nasty name."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from lmlab.report.model import BPB, TRAIN_LOSS, Arm, Cell, Column, Curve, Delta, Report, Run, Stat, Table
from lmlab.report.tables import make_tables, side

NASTY = '<script>alert("1")</script>&amp;\'"'
LABELS = ("norm=rmsnorm pos=rope", "norm=layernorm pos=rope", "norm=rmsnorm pos=alibi", f"norm=rmsnorm name={NASTY}")
BASELINE = Cell("baseline", None, "baseline")
GONE = Cell("–")
ARM_COLUMNS = (
    Column("arm", "arm", help="What sets it apart"),
    Column("parameters", "parameters", True, "All trained numbers, embeddings included"),
    Column("tokens", "tokens", True, "Training tokens seen"),
    Column("val/bits_per_byte", "val bits/byte", True, "Mean over seeds ± sample standard deviation"),
    Column("delta", "Δ to baseline", True, "Arm minus baseline, paired over common seeds"),
    Column("tokens_per_s", "tok/s", True, "Training speed"),
    Column("peak_memory_bytes", "memory", True, "Peak during training"),
    Column("state", "state", help="How many runs are in each state"),
)
RUN_COLUMNS = (
    Column("run", "run", help="The run's directory"),
    Column("seed", "seed", True),
    Column("val/bits_per_byte", "val bits/byte", True),
    Column("tokens", "tokens", True),
    Column("state", "state"),
)


def report(n_arms: int = 4, *, n_points: int = 21, metrics: tuple[str, ...] = (BPB, TRAIN_LOSS)) -> Report:
    """`n_arms` × 2 seeds. Arm 2 has diverged, of arm 3 the second seed was never begun."""
    labels = [LABELS[i] if i < len(LABELS) else f"ffn.d_ff={64 * i} norm=dyt" for i in range(n_arms)]
    arms = [_arm(i, label) for i, label in enumerate(labels)]
    tables = [Table("arms", ARM_COLUMNS, [_arm_row(arm, i) for i, arm in enumerate(arms)])]
    tables.append(Table("runs", RUN_COLUMNS, [_run_row(run, i) for i, arm in enumerate(arms) for run in arm.runs]))
    return Report(
        title="norm × position",
        source="runs/sweeps/norm-pos-0a1b2c3d",
        made="2026-01-02 03:04 UTC",
        axes=["norm", "pos"],
        arms=arms,
        baseline=0,
        tables=tables,
        confounds=[
            f"optim.lr differs: 0.003 in 3 arms, 100.0 in {LABELS[2]}",
            "code: two versions (c0ffee12, 0badf00d)",
        ],
        notes=["± is the sample standard deviation over seeds", "1 damaged line in pos-alibi-seed1"],
        curves=[c for m in metrics for x in ("tokens", "flops", "elapsed_s") for c in _curves(n_arms, m, x, n_points)],
        common={"model": "nano", "train.max_steps": 2000},
    )


AXES = ("norm", "pos", "tokenizer.vocab_size", "optim.lr", "train.batch_tokens")


def five_axes() -> Report:
    """Three arms that differ in five keys, with every column a report can have. Of arm 1 a run stopped, of arm 2 half
    of the runs diverged."""
    made, states = report(3), (("finished", "finished"), ("finished", "finished", "stopped"), ("diverged", "finished"))
    for i, arm in enumerate(made.arms):
        arm.values = dict(zip(AXES, (("rmsnorm", "layernorm")[i % 2], "rope", 4096, 0.003, 65_536 * 2**i), strict=True))
        arm.config = arm.values
        arm.label = " ".join(f"{axis}={value}" for axis, value in arm.values.items())
        arm.runs = [replace(arm.runs[0], name=f"arm{i}-seed{seed}", state=s) for seed, s in enumerate(states[i])]
        loss = Stat(1.8 + 0.01 * i, 0.0504, 2)
        arm.stats = {BPB: loss, "test/bits_per_byte": loss, "tokens_per_s": Stat(121_617.0 + i, 1645.0, 2)}
        arm.facts = {"parameters": 1_315_968, "tokens": 49_152_000, "peak_memory_bytes": 716 * 2**20}
        for seed, run in enumerate(arm.runs):
            run.seeds = dict.fromkeys(("all", "init", "data", "dropout"), seed)
        arm.delta = (
            Delta(0.1, 0.0154, 2, paired=True) if i == 1 else Delta(None, why="other validation text") if i else None
        )
    made.axes = list(AXES)
    made.tables = make_tables(made.axes, made.arms, [])
    return made


def final(arm: int) -> float:
    """The last val bits/byte of an arm, worked out as the curves are."""
    return 1.7 + 0.04 * (arm % 50) + 0.001 * (arm // 50)


def _arm(index: int, label: str) -> Arm:
    states = {2: ("diverged", "diverged"), 3: ("finished", "planned")}.get(index, ("finished", "finished"))
    runs = [
        Run(
            f"{label}-seed{seed}",
            None,
            state,
            {},
            {"all": seed},
            error="loss is NaN at step 30" if state == "diverged" else None,
        )
        for seed, state in enumerate(states)
    ]
    values = dict(word.split("=", 1) for word in label.split() if "=" in word)
    stat = {} if index == 2 else {BPB: Stat(final(index), 0.004, 2)}
    delta = (
        None
        if index == 0
        else Delta(None, why="nothing finished")
        if index == 2
        else Delta(final(index) - final(0), 0.003, 2)
    )
    return Arm(label, values, {"optim.lr": 0.003, **values}, runs, index == 0, stat, delta)


def _arm_row(arm: Arm, index: int) -> list[Cell]:
    stat, delta, parameters = arm.stats.get(BPB), arm.delta, 900_000 + 100_000 * index
    return [
        Cell(arm.label, arm.label, "baseline" if arm.is_baseline else ""),
        Cell(f"{parameters / 1e6:.1f}M", parameters),
        Cell(f"{9 + index}k", 9_000 + 1000 * index),
        Cell(f"{stat.mean:.4f} ± {stat.sd:.4f}", stat.mean) if stat else GONE,
        BASELINE
        if delta is None
        else GONE
        if delta.mean is None
        else Cell(f"{delta.mean:+.4f} ± {delta.sd:.4f}", delta.mean, side(delta)),
        GONE if index == 2 else Cell(f"{23_000 - 900 * (index % 20):,}", 23_000 - 900 * (index % 20)),
        GONE if index == 2 else Cell("412 MB", 412_000_000),
        Cell("diverged", "diverged", "bad")
        if index == 2
        else Cell(" · ".join(arm.states), "finished", "warn" if index == 3 else ""),
    ]


def _run_row(run: Run, index: int) -> list[Cell]:
    done = run.state == "finished"
    mark = "bad" if run.state == "diverged" else "" if done else "warn"
    return [
        Cell(run.name, run.name),
        Cell(str(run.seeds["all"]), run.seeds["all"]),
        Cell(f"{final(index):.4f}", final(index)) if done else GONE,
        Cell("9k", 9000) if done else GONE,
        Cell(run.state, run.state, mark),
    ]


def _curves(n_arms: int, metric: str, x_name: str, n_points: int) -> list[Curve]:
    noise = random.Random(0)
    steps = [10 + i * 1990 / (n_points - 1) for i in range(n_points)]
    curves = []
    for arm in range(n_arms):
        scale = {"tokens": 4096.0, "flops": 3.4e10 * (1 + 0.1 * (arm % 9)), "elapsed_s": 0.02 * (1 + 0.07 * (arm % 7))}[
            x_name
        ]
        size, rough = (3.0, 0.02) if metric == TRAIN_LOSS else (1.0, 0.004)
        mean = [
            size * (final(arm) + 1.2 * math.exp(-s / 300) - 1.2 * math.exp(-2000 / 300)) + noise.gauss(0, rough)
            for s in steps
        ]
        mean[-1] = size * final(arm)
        x, half = [s * scale for s in steps], [0.01 * size * (1 + math.exp(-s / 300)) for s in steps]
        if arm == 2:
            mean = [m + size * max(0.0, (s - 300) / 100) for m, s in zip(mean, steps, strict=True)]
            x, mean, half = x[: n_points // 2], mean[: n_points // 2], half[: n_points // 2]
        n = 1 if arm == 3 else 2
        low = mean if n == 1 else [m - h for m, h in zip(mean, half, strict=True)]
        high = mean if n == 1 else [m + h for m, h in zip(mean, half, strict=True)]
        curves.append(Curve(arm, metric, x_name, x, mean, low, high, n))
    return curves
