"""Training speed and memory beside models of other libraries: same shapes, batches, precision and optimizer, in turns.

Two rows, each of parts that a peer has as well. A peer is trained as its users train it (the C library's own allocator)
and once more with the setting that lmlab makes; lmlab as `lmlab train` trains.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from lmlab.bench import libraries
from lmlab.bench.contender import Contender, Setting, ours, replaced, theirs, trainer
from lmlab.bench.limits import measure
from lmlab.bench.result import Bar, Result
from lmlab.bench.timing import ROUNDS, Spread, ratio
from lmlab.bench.turns import Measured, taken_in_turns
from lmlab.bench.worker import Job
from lmlab.config.load import load
from lmlab.errors import ConfigError
from lmlab.runs.machine import gib

OURS = "lmlab"
SHAPE = ("model=tiny", "train.batch_tokens=2048", "data=sotu")
PARTS = {
    "llama": ("norm=rmsnorm", "pos=rope", "attn=gqa", "ffn=swiglu"),
    "nanogpt": ("preset=nanogpt",),
}
PEERS = {"llama": ("transformers", "litgpt", "x-transformers"), "nanogpt": ("nanoGPT",)}
SIZES = ("name", "n_layers", "d_model", "n_heads", "seq_len")
LEAST_S = 0.7  # of a contender's turn
HEAD = ("parts", "who", "compile", "allocator", "tokens/s", "lmlab is", "peak memory", "first step", "parameters")


def lmlab_trains(words: list[str]) -> Contender:
    setting = Setting.of(words)
    return ours(setting, trainer(setting))


def peer_trains(words: list[str], *, peer: str) -> Contender:
    setting = Setting.of(words)
    return theirs(setting, libraries.BY_NAME[peer](setting.shape))


def words_of(row: str, words: Sequence[str]) -> list[str]:
    """The composition of a row: the shared sizes, its parts, then what was typed of what it has. Compiled or not is
    said last, of each contender."""
    absent = ("compile", *(() if row == "llama" else ("attn.n_kv_heads",)))
    return replaced((*PARTS[row], *SHAPE), [w for w in words if w.partition("=")[0] not in absent])


def jobs(words: Sequence[str], rows: Iterable[str], compiled: Iterable[bool]) -> Iterator[Job]:
    """Each contender; of peers two each, by allocator."""
    for row in rows:
        for c in compiled:
            line = (*words_of(row, words), f"compile={str(c).lower()}")
            labels = {"row": row, "compiled": c}
            yield Job(OURS, lmlab_trains, line, labels=labels)
            for peer in filter(is_installed, PEERS[row]):
                for malloc in (False, True):
                    yield Job(peer, peer_trains, line, {"peer": peer}, labels=labels, malloc=malloc)


def is_installed(peer: str) -> bool:
    return importlib.util.find_spec(libraries.PACKAGES[peer]) is not None


def refuse_unlike(asked: Setting, usual: Setting) -> None:
    """Raises ConfigError for a model that has more of its own than sizes, and for data that is no text: peers have
    neither, and would not be its like."""
    own, known = dataclasses.asdict(asked.exp.model), dataclasses.asdict(usual.exp.model)
    more = [f"model.{key}={value}" for key, value in own.items() if key not in SIZES and known.get(key) != value]
    if more:
        raise ConfigError(
            f"`model` sets {', '.join(more)}, which peers have not",
            "use sizes alone: model=nano, tiny, small, medium or large, model.n_layers, model.d_model, …",
        )
    if asked.prepared.tasks:
        raise ConfigError(
            f"`data={asked.exp.data.name}` is no text, and peers know no answers", "use data=sotu or text"
        )


def run(words: Sequence[str], *, rounds: int = ROUNDS, said: Callable[[str], None] = lambda text: None) -> Result:
    """Start every contender, let them take turns, and set lmlab's rate over each of them, round by round."""
    settings = {row: Setting.of(words_of(row, words)) for row in PARTS}
    first = next(iter(settings.values()))
    for row, setting in settings.items():
        refuse_unlike(setting, Setting.of(words_of(row, ())))
    if first.dtype == torch.float16:
        raise ConfigError("`train.precision` is fp16, which peers are trained in by no scaler", "use bf16 or fp32")
    _ = first.ops  # refused, where this machine can't run them, before anything is measured
    limits = measure(first.device, first.dtype)
    said(limits.said())
    compiled = asked_modes(words)
    shapes = {row: setting.shape.said() for row, setting in settings.items()}
    with taken_in_turns(jobs(words, PARTS, compiled), rounds, said) as found:
        records = [record(m, own_of(m, found)) for m in found]
    lacking = [peer for row in PARTS for peer in PEERS[row] if not is_installed(peer)]
    told = [f"{row}: {shape}" for row, shape in shapes.items()]
    told += [line for row in PARTS for line in verdicts(row, found, records)]
    told += [f"{peer} is not installed: `pip install {peer}` puts it beside the others" for peer in lacking]
    versions = {p: importlib.metadata.version(p) for p in ("torch", *PEERS["llama"]) if p not in lacking}
    facts = {"overrides": list(words), "shapes": shapes, "rounds": rounds, "versions": versions}
    bars = [Bar(m.job.said(), ratio(own_of(m, found).rates, m.rates)) for m in found if m.job.name != OURS]
    table = [cells(one) for one in records]
    return Result("peers", limits, facts, HEAD, table, records, told, bars, "tokens/s of lmlab over the peer's")


def asked_modes(words: Sequence[str]) -> tuple[bool, ...]:
    """Eager and compiled, or what `compile=` says."""
    found = load([word for word in words if word.partition("=")[0] == "compile"]).experiment.compile
    return (False, True) if found == "auto" else (bool(found),)


def own_of(m: Measured, found: Sequence[Measured]) -> Measured:
    """lmlab with the same parts and the same compilation."""
    return next(o for o in found if o.job.name == OURS and o.labels == m.labels)


def record(m: Measured, own: Measured) -> dict[str, Any]:
    return {
        **m.labels,
        "who": m.job.name,
        "lmlab_allocator": m.job.malloc,
        "tokens_per_s": m.rate.as_dict(),
        "lmlab_over_it": ratio(own.rates, m.rates).as_dict(),
        "peak_bytes": m.worker.peak_bytes(),
        "first_step_s": m.ready.first_step_s,
        "parameters": m.ready.n_parameters,
        "loss": {"first": m.ready.first_loss, "last": m.worker.loss, "steps": m.worker.done},
    }


def cells(one: dict[str, Any]) -> tuple[str, ...]:
    """A record as a row of the table."""
    return (
        one["row"],
        one["who"],
        "yes" if one["compiled"] else "no",
        "lmlab's" if one["lmlab_allocator"] else "its own",
        Spread(**one["tokens_per_s"]).said(",.0f"),
        "" if one["who"] == OURS else Spread(**one["lmlab_over_it"]).said(unit="×"),
        gib(one["peak_bytes"]),
        f"{one['first_step_s']:.1f} s",
        f"{one['parameters']:,}",
    )


def verdicts(row: str, found: Sequence[Measured], records: Sequence[dict[str, Any]]) -> list[str]:
    """lmlab over the fastest peer of the row: as its users run it, and like for like; and the leanest peer's memory."""
    peak = {id(m): one["peak_bytes"] for m, one in zip(found, records, strict=True)}
    mine = [m for m in found if m.labels["row"] == row and m.job.name == OURS]
    peers = [m for m in found if m.labels["row"] == row and m.job.name != OURS]
    lines = []
    for own in mine:
        for theirs_compiled in {False, own.labels["compiled"]}:
            for malloc in (False, True):
                rivals = [m for m in peers if m.labels["compiled"] == theirs_compiled and m.job.malloc == malloc]
                if rivals:
                    fastest = max(rivals, key=lambda m: m.rate.median)
                    over = ratio(own.rates, fastest.rates).said(unit="×")
                    same = ", with the same allocator setting" if malloc else ""
                    who = f"{mode(theirs_compiled)} {fastest.job.name}"
                    lines.append(f"{row}: {mode(own.labels['compiled'])} is {over} the fastest peer, {who}{same}")
        rivals = [m for m in peers if m.labels["compiled"] == own.labels["compiled"]]
        if rivals:
            leanest = min(rivals, key=lambda m: peak[id(m)])
            share = f"{gib(peak[id(own)])}, {peak[id(own)] / peak[id(leanest)]:.2f}× the leanest peer"
            lines.append(f"{row}: {mode(own.labels['compiled'])} takes {share} ({leanest.job.name})")
    return lines


def mode(compiled: bool) -> str:
    return "compiled" if compiled else "eager"
