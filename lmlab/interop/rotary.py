"""Pairs of rotated channels, interleaved ↔ half: the same function under a fixed permutation of the rows of q and k.

interleaved turns channels (2i, 2i+1), half turns (i, i + d/2) of the first d of each head. The permutation acts on the
weights and biases of q and k and on the weights of QK-norm; scores, and so everything else, stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lmlab.model.spec import MLA, Arch, HeadsSpec, Rope


def repaired(state: Mapping[str, Tensor], arch: Arch, *, wanted: str, given: str) -> dict[str, Tensor]:
    """The tensors for `wanted` pairing out of those for `given` ("half", "interleaved")."""
    if wanted == given or not isinstance(arch.pos, Rope):
        return dict(state)
    places = dict(rotated(arch))
    found = {}
    for name, tensor in state.items():
        module = name.partition("blocks.")[2].partition(".")[2].rpartition(".")[0]
        found[name] = tensor if module not in places else _permuted(tensor, *places[module], to_half=wanted == "half")
    return found


def rotated(arch: Arch) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """(module within a layer, (rows of each head, the first that turns, how many turn))."""
    D, H = arch.model.d_model, arch.model.n_heads
    assert isinstance(arch.pos, Rope)
    turn = arch.pos.width(arch.attn.rotary_size(D, H))
    if isinstance(arch.attn, MLA):
        plain, wide = arch.attn.plain_size(D, H), arch.attn.head_size(D, H)
        yield "attn.q" if arch.attn.q_rank is None else "attn.q_up", (wide, plain, turn)
        rank = arch.attn.latent_size(D)
        yield "attn.kv_down", (rank + arch.attn.rotary_size(D, H), rank, turn)
    elif isinstance(arch.attn, HeadsSpec):
        for module in ("attn.q", "attn.k", "attn.q_norm", "attn.k_norm"):
            yield module, (arch.head_dim(), 0, turn)


def _permuted(tensor: Tensor, size: int, start: int, turn: int, *, to_half: bool) -> Tensor:
    order = torch.arange(size)
    shape = (2, -1) if not to_half else (-1, 2)
    order[start : start + turn] = order[start : start + turn].view(shape).T.flatten()
    return tensor.unflatten(0, (-1, size))[:, order].flatten(0, 1)
