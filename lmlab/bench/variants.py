"""Does speed hold for every composition? Each option of each group beside the default, per FLOP.

A variant's figure is the FLOP/s that its training reaches over those of the default in the same turn: what it computes
more or less of is taken out, what is left is how well that is computed. Tokens/s stand beside it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lmlab.bench.contender import Contender, Setting, ours, replaced, trainer
from lmlab.bench.limits import measure
from lmlab.bench.result import Bar, Result
from lmlab.bench.timing import ROUNDS, Spread, in_turns, ratio
from lmlab.cost.flops import flops_per_token
from lmlab.errors import LmlabError, in_one_line
from lmlab.registry import OPTIONS
from lmlab.train.device import tune_malloc

GROUPS = ("norm", "block", "pos", "rope_scaling", "attn", "ffn", "moe")
SHAPE = ("model=tiny", "train.batch_tokens=2048", "compile=false")
NEEDS = {  # of options that say nothing alone: what they are measured with
    ("block", "simplified"): ("attn.weights=shaped",),
}
FIELDS = (
    ("attn.window=64",),
    ("attn.qk_norm=head",),
    ("attn.softcap=30",),
    ("pos.pairing=interleaved",),
    ("pos.fraction=0.5",),
    ("data.packing=documents",),
    ("model.dropout=0.1",),
)
HEAD = ("variant", "FLOP/s over the default's", "tokens/s over it", "tokens/s", "FLOPs/token over it", "")
SLOW = 0.9
LEAST_S = 0.5


def run(words: Sequence[str], *, rounds: int = ROUNDS, said: Callable[[str], None] = lambda text: None) -> Result:
    """The options of a group take turns with the default; then the next group. In one process, on new tokens."""
    tune_malloc()
    base = replaced(SHAPE, words)
    setting = Setting.of(base)
    _ = setting.ops  # refused, where this machine can't run them, before anything is measured
    limits = measure(setting.device, setting.dtype)
    said(limits.said())
    records: list[dict[str, Any]] = []
    told, bars = [setting.shape.said()], []
    for group, variants in groups(setting):
        said(f"{group}: {', '.join(' '.join(v) for v in variants)}")
        for record in compared(base, variants, setting, rounds, told):
            records.append({"group": group, **record})
            bars.append(Bar(record["variant"], Spread(**record["flops_ratio"])))
    slow = [one for one in records if one["flops_ratio"]["median"] < SLOW]
    told += [f"below {SLOW} × the default: {one['variant']} {one['flops_ratio']['median']:.2f}" for one in slow]
    facts = {"overrides": list(words), "shape": setting.shape.said(), "rounds": rounds}
    table = [cells(one) for one in records]
    return Result("variants", limits, facts, HEAD, table, records, told, bars, "FLOP/s over the default's")


def groups(setting: Setting) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """(group, what is typed for each of its other options); then single fields."""
    for group in GROUPS:
        own = getattr(setting.exp, group).name
        others = [name for name in OPTIONS[group] if name != own]
        yield group, [(f"{group}={name}", *NEEDS.get((group, name), ())) for name in others]
    yield "fields", list(FIELDS)


def compared(
    base: list[str], variants: Sequence[tuple[str, ...]], setting: Setting, rounds: int, told: list[str]
) -> Iterator[dict[str, Any]]:
    """A record of each variant that composes; why one does not is added to `told`."""
    contenders, flops = {"": build(setting)}, {"": flops_of(setting)}
    for words in variants:
        label = " ".join(words)
        try:
            other = Setting.of(replaced(base, words))
            contenders[label], flops[label] = build(other), flops_of(other)
        except LmlabError as error:
            told.append(f"{label} is not measured: {in_one_line(error)}")
    counters = dict.fromkeys(contenders, 0)

    def stepping(label: str) -> Callable[[], None]:
        def step() -> None:
            contenders[label].step(counters[label])
            counters[label] += 1

        return step

    times = in_turns({label: stepping(label) for label in contenders}, setting.device, rounds=rounds, least_s=LEAST_S)
    tokens = setting.exp.train.batch_tokens
    for label in list(contenders)[1:]:
        faster = ratio(times[""], times[label])
        work = flops[label] / flops[""]
        yield {
            "variant": label,
            "flops_ratio": Spread.of([a / b * work for a, b in zip(times[""], times[label], strict=True)]).as_dict(),
            "tokens_ratio": faster.as_dict(),
            "tokens_per_s": Spread.of([tokens / s for s in times[label]]).as_dict(),
            "flops_per_token_ratio": work,
        }
    contenders.clear()
    gc.collect()


def build(setting: Setting) -> Contender:
    return ours(setting, trainer(setting))


def flops_of(setting: Setting) -> float:
    return flops_per_token(setting.skeleton(), setting.exp.arch)


def cells(one: dict[str, Any]) -> tuple[str, ...]:
    flops, tokens, rate = (Spread(**one[k]) for k in ("flops_ratio", "tokens_ratio", "tokens_per_s"))
    mark = f"below {SLOW}" if flops.median < SLOW else ""
    work = one["flops_per_token_ratio"]
    return str(one["variant"]), flops.said(), tokens.said(), f"{rate.median:,.0f}", f"{work:.3f}", mark
