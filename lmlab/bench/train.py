"""How fast one composition trains here, where a step's time goes, and what composing it from parts costs.

The step is that of `lmlab train`, on its own batches, in a process of its own whose peak memory is the step's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lmlab.bench import by_hand
from lmlab.bench.contender import Contender, Setting, ours, trainer
from lmlab.bench.limits import Limits, measure
from lmlab.bench.result import Bar, Result
from lmlab.bench.timing import ROUNDS, Spread, ratio
from lmlab.bench.turns import Measured, taken_in_turns
from lmlab.bench.worker import Job
from lmlab.cost.flops import flops_per_token, palm_flops_per_token
from lmlab.runs.machine import gib
from lmlab.train.twin import Twin

HEAD = ("who", "tokens/s", "lmlab is", "MFU (PaLM)", "MFU (causal half)", "peak memory", "first step")
COMPOSED, PLAIN = "lmlab", "the same net by hand"
BREAKDOWN_STEPS = 8


def composed(words: list[str]) -> Contender:
    setting = Setting.of(words)
    return ours(setting, trainer(setting))


def written(words: list[str]) -> Contender:
    """The same step around the net of by_hand.py."""
    setting = Setting.of(words)
    made = trainer(setting)
    made.stepper.twin = Twin(by_hand.of(setting.exp, made.master), setting.dtype)  # type: ignore[arg-type]
    return ours(setting, made)


def run(words: Sequence[str], *, rounds: int = ROUNDS, said: Callable[[str], None] = lambda text: None) -> Result:
    """Tokens/s beside the same net written by hand (where the composition is that net), MFU, memory, and the step's
    pieces."""
    setting = Setting.of(list(words))
    _ = setting.ops  # refused, where this machine can't run them, before anything is measured
    limits = measure(setting.device, setting.dtype)
    said(limits.said())
    line = tuple(words)
    jobs = [Job(COMPOSED, composed, line)]
    if by_hand.same_net(setting.exp) and not setting.compiled:
        jobs.append(Job(PLAIN, written, line))
    with taken_in_turns(jobs, rounds, said) as found:
        pieces = found[0].worker.breakdown(BREAKDOWN_STEPS)
        records = [record(m, found[0], setting, limits) for m in found]
    whole = sum(pieces.values())
    told = [setting.shape.said()]
    told += [f"{label}: {1000 * s:.2f} ms, {s / whole:.1%} of a step" for label, s in pieces.items()]
    if len(jobs) == 1:
        told.append("by hand only the default's net in eager mode is written: nothing is set beside this composition")
    facts = {"overrides": list(words), "shape": setting.shape.said(), "rounds": rounds, "step_s": pieces}
    bars = [Bar(m.job.name, ratio(found[0].rates, m.rates)) for m in found[1:]]
    table = [cells(one) for one in records]
    return Result("train", limits, facts, HEAD, table, records, told, bars, "tokens/s of lmlab over")


def record(m: Measured, own: Measured, setting: Setting, limits: Limits) -> dict[str, Any]:
    """MFU: of the matrix products that this machine does here and now."""
    exp, rate = setting.exp, m.rate
    net = setting.skeleton()
    shares = {"palm": palm_flops_per_token(net, exp.arch), "causal_half": flops_per_token(net, exp.arch)}
    return {
        "who": m.job.name,
        "tokens_per_s": rate.as_dict(),
        "lmlab_over_it": ratio(own.rates, m.rates).as_dict(),
        "mfu": {how: rate.median * flops / limits.flops for how, flops in shares.items()},
        "peak_bytes": m.worker.peak_bytes(),
        "first_step_s": m.ready.first_step_s,
        "loss": {"first": m.ready.first_loss, "last": m.worker.loss, "steps": m.worker.done},
    }


def cells(one: dict[str, Any]) -> tuple[str, ...]:
    return (
        one["who"],
        Spread(**one["tokens_per_s"]).said(",.0f"),
        "" if one["who"] == COMPOSED else Spread(**one["lmlab_over_it"]).said(".3f", "×"),
        f"{one['mfu']['palm']:.1%}",
        f"{one['mfu']['causal_half']:.1%}",
        gib(one["peak_bytes"]),
        f"{one['first_step_s']:.1f} s",
    )
