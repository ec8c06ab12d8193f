"""A folder's tensors as those of our model, and back. Strict: each is used once, each of ours is filled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lmlab.errors import LmlabError, RunError, listed, raise_all
from lmlab.interop.family import Family
from lmlab.interop.folder import Weights, skipped
from lmlab.interop.names import Pair, pairs
from lmlab.interop.rotary import repaired
from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto
from lmlab.model.spec import Arch
from lmlab.model.transformer import Transformer

EMBED = "embed.weight"
STEERING = "router.bias"  # a buffer that is moved between steps, and no parameter


@dataclass(frozen=True)
class Plan:
    """Ours by shape, and how theirs answer to them."""

    shapes: dict[str, torch.Size]
    pairs: list[Pair]

    def expected(self) -> dict[str, torch.Size]:
        """Their names and shapes: what the layouts make of ours, without memory."""
        empty = {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        return {name: tensor.shape for pair in self.pairs for name, tensor in theirs_of(pair, empty)}


def theirs_of(pair: Pair, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from zip(pair.theirs, pair.to_theirs([ours[name] for name in pair.ours]), strict=True)


def ours_of(pair: Pair, theirs: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from zip(pair.ours, pair.to_ours([theirs(name) for name in pair.theirs]), strict=True)


def plan(arch: Arch, family: Family, vocab: int) -> Plan:
    with torch.device("meta"):
        net = Transformer(arch, vocab, resolve(Auto(), "cpu", torch.float32))
    shapes = {name: tensor.shape for name, tensor in net.state_dict().items()}  # a router's bias is no parameter
    return Plan(shapes, pairs(family.table(arch), shapes, arch.model.n_layers))


def parameters(state: Mapping[str, Tensor]) -> int:
    """How many there are in our tensors."""
    return sum(tensor.numel() for name, tensor in state.items() if not name.endswith(STEERING))


def embedding_of(arch: Arch, family: Family) -> str:
    """Their name of the token embedding."""
    return next(f"{row.theirs}.weight" for row in family.table(arch) if row.ours == ("embed",))


def imported(weights: Weights, arch: Arch, family: Family, pairing: str, vocab: int) -> dict[str, Tensor]:
    """Our tensors, fp32. pairing: that of the folder's rows; vocab: rows of the embedding. Raises RunError, all of
    them at once."""
    embedding = embedding_of(arch, family)
    found = plan(arch, family, vocab)
    tied = f"{family.head}.weight" if arch.model.tie_embeddings else None
    refuse_mismatch(weights, found.expected(), family, tied)
    if tied in weights.places and not torch.equal(weights.tensor(tied), weights.tensor(embedding)):
        raise RunError(
            f"`{tied}` differs from `{embedding}`, and config.json says `tie_word_embeddings` true",
            "set tie_word_embeddings to false in config.json if the head is one of its own",
        )
    state: dict[str, Tensor] = {}
    for pair in found.pairs:
        state |= {own: part.contiguous() for own, part in ours_of(pair, weights.tensor)}
    wanted = getattr(arch.pos, "pairing", pairing)
    return {n: t.contiguous() for n, t in repaired(state, arch, wanted=wanted, given=pairing).items()}


def refuse_mismatch(weights: Weights, expected: Mapping[str, torch.Size], family: Family, tied: str | None) -> None:
    """Missing, unexpected and misshapen tensors, each kind as one error."""
    present = {name for name in weights.places if not skipped(name, family)}
    missing, odd = sorted(expected.keys() - present), sorted(present - expected.keys() - {tied})
    errors: list[LmlabError] = []
    hint = "the folder is damaged, or its config.json belongs to another model"
    if missing:
        errors.append(RunError(f"{weights.folder} lacks {_counted(missing)}", hint))
    if odd:
        text = f"{weights.folder} has {_counted(odd)}, which config.json does not speak of"
        errors.append(RunError(text, hint))
    for name in sorted(expected.keys() & present):
        if (shape := weights.shape(name)) != tuple(expected[name]):
            text = f"`{name}` is {list(shape)}, and config.json makes it {list(expected[name])}"
            errors.append(RunError(text, hint))
    raise_all(errors[:8])


def _counted(names: list[str]) -> str:
    plural = "tensors" if len(names) > 1 else "the tensor"
    count = f"{len(names)} " if len(names) > 1 else ""
    return f"{count}{plural} {listed((f'`{n}`' for n in names), 4)}"


def exported(state: Mapping[str, Tensor], arch: Arch, family: Family, pairing: str) -> dict[str, Tensor]:
    """Theirs out of ours. pairing: what config.json will say the rows are in."""
    given = getattr(arch.pos, "pairing", pairing)
    own = repaired(state, arch, wanted=pairing, given=given)
    found = plan(arch, family, len(state[EMBED]))
    return {name: tensor.contiguous() for pair in found.pairs for name, tensor in theirs_of(pair, own)}
