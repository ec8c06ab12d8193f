"""How fast prompts are read and tokens are written, by attention, batch and kernels, and what bounds each.

A step of decoding reads every weight and every cached key once and computes two FLOPs a weight and row: the two floors
say how long that would take at this machine's rates. Where a step takes several times the larger of them, it is the
launching of many small operations that costs (launch-bound).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lmlab.bench.contender import Setting, replaced
from lmlab.bench.limits import Limits, measure
from lmlab.bench.result import Bar, Result
from lmlab.bench.timing import ROUNDS, Spread, ratio
from lmlab.cost.cache import cache_bytes
from lmlab.cost.flops import active_parameters, mean_context
from lmlab.errors import ConfigError
from lmlab.generate.decode import Generated, generate
from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto, Reference
from lmlab.model.cache import FULL
from lmlab.model.transformer import Transformer, build
from lmlab.runs.machine import gib
from lmlab.train.device import be_deterministic, tune_malloc

ATTN, BATCHES, NEW = ("mha", "gqa", "mqa", "mla"), (1, 8), 64
LAUNCH_BOUND = 3.0  # times the larger floor
HEAD = ("attention", "rows", "how", "prefill tokens/s", "decode tokens/s", "over plain", "a step", "bound by", "cache")
FUSED, PLAIN = "fused", "plain"


@dataclass(frozen=True)
class Way:
    """How it is decoded: kernels=auto or reference; on CUDA each with and without a recorded step."""

    name: str
    fused: bool
    graph: bool


def ways(device: torch.device) -> list[Way]:
    """The plain one first."""
    if device.type == "cpu":
        return [Way(PLAIN, False, False), Way(FUSED, True, False)]
    graphs = (Way(f"{PLAIN}, CUDA graph", False, True), Way(f"{FUSED}, CUDA graph", True, True))
    return [Way(PLAIN, False, False), Way(FUSED, True, False), *graphs]


def run(words: Sequence[str], *, rounds: int = ROUNDS, said: Callable[[str], None] = lambda text: None) -> Result:
    """Random weights and prompts of half a row, greedy, the ways taking turns."""
    setting = Setting.of(list(words))
    if setting.exp.model.seq_len < 4:
        raise ConfigError(
            f"`model.seq_len` is {setting.exp.model.seq_len}: half of it is to be read, half written", "use 4 or more"
        )
    attns = [word.partition("=")[2] for word in words if word.startswith("attn=")] or list(ATTN)
    settings = {name: Setting.of(replaced(words, [f"attn={name}"])) for name in attns}
    if setting.device.type == "cpu":
        tune_malloc()
    be_deterministic(setting.device)
    limits = measure(setting.device, setting.dtype)
    said(limits.said())
    records: list[dict[str, Any]] = []
    for name, own in settings.items():
        said(f"attn={name}")
        records += compared(own, name, limits, rounds)
    shape, precision = setting.shape, str(setting.dtype).removeprefix("torch.")
    sizes = f"L={shape.L} D={shape.D} H={shape.H} F={shape.F} V={shape.V}"
    told = [f"{sizes}; prompts of {prompt_len(setting)} tokens, {n_new(setting)} new ones, {precision}"]
    bars = [
        Bar(f"{one['attn']}, {one['rows']} rows, {one['how']}", Spread(**one["over_plain"]))
        for one in records
        if one["how"] != PLAIN
    ]
    facts = {"overrides": list(words), "shape": setting.shape.said(), "rounds": rounds, "new_tokens": n_new(setting)}
    table = [cells(one) for one in records]
    return Result("decode", limits, facts, HEAD, table, records, told, bars, "decoded tokens/s over plain kernels'")


def prompt_len(setting: Setting) -> int:
    """Half a row."""
    return setting.exp.model.seq_len // 2


def n_new(setting: Setting) -> int:
    """The other half, 64 at most: no position is beyond what the model was made for."""
    return min(NEW, setting.exp.model.seq_len - prompt_len(setting))


def compared(setting: Setting, attn: str, limits: Limits, rounds: int) -> Iterator[dict[str, Any]]:
    nets = {way: built(setting, way) for way in ways(setting.device)}
    first = next(iter(nets))
    for rows in BATCHES:
        found: dict[Way, list[Generated]] = {way: [] for way in nets}
        for turn in range(rounds + 1):
            prompts = drawn(setting, rows, turn)
            for way, net in nets.items():
                one = generate(net, prompts, max_new=n_new(setting), graph=way.graph)
                if turn:  # the first warms up
                    found[way].append(one)
        for way, all_of in found.items():
            yield record(setting, attn, rows, way, all_of, found[first], limits)


def built(setting: Setting, way: Way) -> Transformer:
    ops = resolve(Auto() if way.fused else Reference(), setting.device, setting.dtype)
    exp = setting.exp
    made = build(exp.arch, setting.vocab_size, ops, seed=0, device=setting.device, dtype=setting.dtype)
    return made.eval()


def drawn(setting: Setting, rows: int, seed: int) -> list[list[int]]:
    source = torch.Generator().manual_seed(seed)
    found: list[list[int]] = torch.randint(setting.vocab_size, (rows, prompt_len(setting)), generator=source).tolist()
    return found


def record(
    setting: Setting, attn: str, rows: int, way: Way, found: list[Generated], plain: list[Generated], limits: Limits
) -> dict[str, Any]:
    rates = [one.decode_tokens_per_s for one in found]
    step_s = Spread.of([rows / rate for rate in rates])
    floors = floors_s(setting, rows, limits)
    return {
        "attn": attn,
        "rows": rows,
        "how": way.name,
        "path": found[-1].decode_path,
        "prefill_tokens_per_s": Spread.of([one.prefill_tokens_per_s for one in found]).as_dict(),
        "decode_tokens_per_s": Spread.of(rates).as_dict(),
        "over_plain": ratio(rates, [one.decode_tokens_per_s for one in plain]).as_dict(),
        "step_s": step_s.as_dict(),
        "floors_s": floors,
        "bound_by": bound_by(step_s.median, floors),
        "cache_bytes": found[-1].cache_bytes,
    }


def floors_s(setting: Setting, rows: int, limits: Limits) -> dict[str, float]:
    """Seconds of a step at the rates of copies and of matrix products, in the middle of the text."""
    exp, size = setting.exp, setting.dtype.itemsize
    n, columns = active_parameters(setting.skeleton(), exp.arch), prompt_len(setting) + n_new(setting) // 2
    attn: Any = exp.attn
    keys = [min(columns, 2 * mean_context(columns, attn.layer_window(layer))) for layer in range(exp.model.n_layers)]
    flops = 2 * n * rows + rows * attn.context_flops(exp.model.d_model, exp.model.n_heads) * sum(keys)
    n_bytes = n * size + cache_bytes(exp.arch, rows, columns, size, FULL)
    return {"bandwidth": n_bytes / limits.copy_bytes, "compute": flops / limits.flops}


def bound_by(step_s: float, floors: dict[str, float]) -> str:
    """launch, bandwidth or compute."""
    label, floor_s = max(floors.items(), key=lambda item: item[1])
    return "launch" if step_s > LAUNCH_BOUND * floor_s else label


def cells(one: dict[str, Any]) -> tuple[str, ...]:
    rate, over, step = (Spread(**one[key]) for key in ("decode_tokens_per_s", "over_plain", "step_s"))
    floor = max(one["floors_s"].values())
    return (
        one["attn"],
        str(one["rows"]),
        one["how"],
        f"{one['prefill_tokens_per_s']['median']:,.0f}",
        rate.said(",.0f"),
        "" if one["how"] == PLAIN else over.said(unit="×"),
        f"{1000 * step.median:.2f} ms, {step.median / floor:.1f}× its floor",
        one["bound_by"],
        gib(one["cache_bytes"]),
    )
