"""Weights of one run as the start of another: each tensor is copied, made from one of theirs, or begins as it must.

Pure functions on state dicts; on meta tensors they tell what would be done. Nothing of the source is dropped and
nothing is left to chance: a tensor that no rule makes is an error. What may differ at all is decided before, by
lmlab/compat/start.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmlab.config.load import Start
from lmlab.errors import RunError
from lmlab.model.init import ZEROS, table, z
from lmlab.model.spec import Arch, HeadsSpec
from lmlab.runs.meta import MODEL, read_meta

COPIED, RESIZED, FRESH = "copied", "resized", "fresh"
POOLED = ("blocks.*.attn.k.*", "blocks.*.attn.v.*", "blocks.*.attn.k_norm.weight")
POSITIONS, EMBEDDING, HEAD = "pos.weight", "embed.weight", "head.weight"


@dataclass(frozen=True)
class Taken:
    """How a tensor of the new run came about; `note` says it of all that are no plain copies."""

    name: str
    how: str
    parameters: int
    note: str = ""


@dataclass(frozen=True)
class Weights:
    """What a run starts with, and how each tensor of it came about."""

    state: dict[str, Tensor]
    taken: list[Taken]

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: more than the tokenizer has ids when the vocabulary was padded."""
        return len(self.state[EMBEDDING])


def started(
    source: Mapping[str, Tensor], old: Arch, new: Arch, skeleton: nn.Module, *, resize: str, seed: int
) -> Weights:
    """The state of `skeleton` (a model of `new`, on meta) made from that of a model of `old`.

    resize: `init.resize`; seed: of what is drawn. Raises RunError for a tensor of either that nothing is made of."""
    maker = _Maker(source, old, new, skeleton, resize, seed)
    state, taken = {}, []
    for name, like in skeleton.state_dict().items():
        state[name], how, note = maker.make(name, like)
        taken.append(Taken(name, how, like.numel(), note))
    if lost := [name for name in source if name not in state]:
        raise RunError(f"{lost[0]} of the source has no place in this model", "start from a run of the same parts")
    return Weights(state, taken)


@dataclass(frozen=True)
class _Maker:
    source: Mapping[str, Tensor]
    old: Arch
    new: Arch
    skeleton: nn.Module
    resize: str
    seed: int

    def make(self, name: str, like: Tensor) -> tuple[Tensor, str, str]:
        """(the tensor, how, a note)."""
        theirs = self.source.get(name)
        if theirs is None:
            return self.begun(name, like)
        if theirs.shape == like.shape:
            return theirs, COPIED, ""
        made, note = self.resized(name, theirs, like)
        if made.shape != like.shape:
            raise RunError(
                f"{name} is {_shape(like)}, and the source's is {_shape(theirs)}", "start from a run of the same sizes"
            )
        return made, RESIZED, f"{_shape(theirs)} → {_shape(like)}, {note}"

    def resized(self, name: str, theirs: Tensor, like: Tensor) -> tuple[Tensor, str]:
        heads = isinstance(self.old.attn, HeadsSpec) and isinstance(self.new.attn, HeadsSpec)
        if heads and any(fnmatchcase(name, pattern) for pattern in POOLED):
            counts = [arch.attn.kv_heads(arch.model.n_heads) for arch in (self.old, self.new)]
            return pool_heads(theirs, *counts), f"means of {counts[0] // counts[1]} heads"
        if name == POSITIONS and self.resize == "interpolate":
            return interpolate(theirs, len(like)), "interpolated"
        if name == POSITIONS and self.resize == "extend":
            n, rule = len(like), table(self.skeleton)[name]
            if n <= len(theirs):
                return theirs[:n].clone(), "cut"
            drawn = z(self.seed, name, tuple(like.shape)).mul_(rule.std).add_(rule.mean).to(theirs)
            return torch.cat((theirs, drawn[len(theirs) :])), f"{n - len(theirs)} rows drawn"
        return theirs, ""

    def begun(self, name: str, like: Tensor) -> tuple[Tensor, str, str]:
        """A tensor that the source has not, such that the function is what it was."""
        embedding = self.source.get(EMBEDDING)
        if name == HEAD and embedding is not None and embedding.shape == like.shape:
            return embedding.clone(), COPIED, f"of {EMBEDDING}"
        if name.endswith(".bias") and table(self.skeleton).get(name) == ZEROS:
            return torch.zeros(like.shape, device=next(iter(self.source.values())).device), FRESH, "zeros"
        raise RunError(f"the source has no {name}", "start from a run that has this part")


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape))


def pool_heads(theirs: Tensor, n: int, wanted: int) -> Tensor:
    """(n·C, …) → (wanted·C, …): means over groups of n/wanted heads that lie together, as query head h reads key/value
    head h // (H/K) (Ainslie et al. 2023, 2305.13245). As it is when the heads don't divide so."""
    if n % wanted or len(theirs) % n:
        return theirs
    grouped = theirs.unflatten(0, (wanted, n // wanted, len(theirs) // n))
    return grouped.double().mean(1).flatten(0, 1).to(theirs.dtype)


def interpolate(theirs: Tensor, n: int) -> Tensor:
    """(m, D) → (n, D), linear along positions; the first and the last row stay."""
    across = F.interpolate(theirs.double().T[None], size=n, mode="linear", align_corners=True)
    return across[0].T.contiguous().to(theirs.dtype)


# ---------------------------------------------------------------- the source, without its values


def shapes(checkpoint: Path) -> dict[str, Tensor]:
    """The model's state on meta: names and shapes as the file's header says them. Raises RunError."""
    from safetensors import safe_open

    try:
        with safe_open(checkpoint / MODEL, framework="pt") as file:
            names = list(file.keys())
            found = {n: torch.empty(file.get_slice(n).get_shape(), device="meta") for n in names}
    except Exception as error:  # its own, and whatever the disk says
        raise RunError(f"{checkpoint / MODEL} can't be read: {error}", "name another checkpoint of the run") from error
    return found | {alias: found[name] for alias, name in read_meta(checkpoint)["aliases"].items()}


# ---------------------------------------------------------------- what is told of it


def counted(taken: Sequence[Taken]) -> dict[str, dict[str, int]]:
    """{"copied": {"tensors": 38, "parameters": 123456}, "resized": …, "fresh": …}."""
    found = {}
    for how in (COPIED, RESIZED, FRESH):
        own = [t.parameters for t in taken if t.how == how]
        found[how] = {"tensors": len(own), "parameters": sum(own)}
    return found


def lineage(start: Start, weights: Weights, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """For the new run's manifest: where its weights are from, and what became of them. manifest: the source's own,
    whose lineage is passed on, without its tables."""
    found: dict[str, Any] = {
        "run": start.run.absolute().name,
        "path": str(start.run.absolute()),
        "step": start.step,
        "content_hash": start.content_hash,
        "vocab_size": weights.vocab_size,
        **counted(weights.taken),
        "changed": [{"name": t.name, "how": t.how, "note": t.note} for t in weights.taken if t.note],
        "lineage": _passed_on(manifest),
    }
    return found


def _passed_on(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    if imported := manifest.get("imported"):
        return {"imported": {key: imported.get(key) for key in ("source", "commit", "family")}}
    own = manifest.get("lineage")
    return {k: own.get(k) for k in ("run", "path", "step", "content_hash", "lineage")} if own else None


def lines(start: Start, taken: Sequence[Taken]) -> Iterator[tuple[str, str]]:
    """The table before training: (label, text). Names that differ in their layer only are told as one."""
    parts = [f"{n['tensors']} {how} ({n['parameters']:,})" for how, n in counted(taken).items()]
    yield "from", f"{start.run.absolute().name} step {start.step} · tensors (parameters): {' · '.join(parts)}"
    by_note: dict[tuple[str, str], dict[str, list[int]]] = {}
    for t in taken:
        if t.note:
            layer = re.match(r"blocks\.(\d+)\.", t.name)
            name = f"blocks.{{}}.{t.name[layer.end() :]}" if layer else t.name
            by_note.setdefault((t.how, t.note), {}).setdefault(name, []).append(int(layer[1]) if layer else 0)
    for (how, note), names in by_note.items():
        yield how, f"{', '.join(name.format(_layers(layers)) for name, layers in names.items())}: {note}"


def _layers(layers: Sequence[int]) -> str:
    """`0-5`, or `0,2,4`."""
    whole = len(layers) > 1 and list(layers) == list(range(layers[0], layers[-1] + 1))
    return f"{layers[0]}-{layers[-1]}" if whole else ",".join(map(str, layers))
