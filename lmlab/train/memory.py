"""How many rows fit at once, known before the first step.

The activations of a row are counted, not guessed: a forward pass on the meta device, where every tensor that autograd
would keep is added up once per storage.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lmlab.errors import ConfigError
from lmlab.kernels.attention import Rendered
from lmlab.kernels.loss import linear_cross_entropy
from lmlab.kernels.resolve import Ops
from lmlab.kernels.scores import Scores
from lmlab.model.spec import Arch
from lmlab.model.transformer import Transformer
from lmlab.runs.machine import free_host_bytes, gib
from lmlab.train.twin import cast_parameters

MASTER_BYTES = 8  # of a parameter: fp32 master and gradient; the optimizer's state comes on top
USABLE_FRAC = 0.8
CHUNK_TOKENS = 4096  # at most, of the loss that never holds all logits


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes a step needs: fixed + micro_rows · per_row, against what is free."""

    micro_rows: int
    n_micro: int
    fixed_bytes: int
    per_row_bytes: int
    free_bytes: int

    @property
    def needed_bytes(self) -> int:
        return self.fixed_bytes + self.micro_rows * self.per_row_bytes


def free_bytes(device: torch.device) -> int:
    """Free memory of the device; on CPU also bounded by the control group's limit."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_host_bytes()


def part_of(device: torch.device, parts: int) -> int:
    """What each of `parts` runs on one device may use: of a GPU that part of the whole, whenever the run starts."""
    if parts == 1 or device.type == "cpu":
        return free_bytes(device) // parts
    return int(min(free_bytes(device), torch.cuda.mem_get_info(device)[1] // parts))


class _Flash(torch.autograd.Function):
    """Keeps what fused attention keeps: q, k, v, the output and one log-sum per row. On meta torch would run the
    unfused formula and keep the scores."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = q.new_empty(*q.shape[:3], v.shape[3])
        ctx.save_for_backward(q, k, v, mask, out, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("only counted")


def _counted_sdpa(
    q_BTHC: Tensor,
    k_BSKC: Tensor,
    v_BSKC: Tensor,
    scores: Scores,
    rendered: Rendered,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    return _Flash.apply(q_BTHC, k_BSKC, v_BSKC, rendered.mask)


def saved_bytes(
    arch: Arch,
    vocab_size: int,
    ops: Ops,
    dtype: torch.dtype,
    rows: int,
    *,
    packed: bool = False,
    recompute: bool = False,
) -> int:
    """Bytes autograd keeps of one forward pass of `rows` training rows, without allocating any. packed: rows are cut
    into documents, so that each has a mask of its own. recompute: of a block what enters it, and all of one at a time,
    the largest."""
    counting = dataclasses.replace(ops, attention={**ops.attention, "sdpa": _counted_sdpa})
    with torch.device("meta"):
        model = cast_parameters(Transformer(arch, vocab_size, counting), dtype)
        tokens = torch.zeros(rows, arch.model.seq_len, dtype=torch.int64)
        positions = torch.arange(arch.model.seq_len).expand(rows, -1)
        weights = torch.ones(rows, arch.model.seq_len)
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    outside: dict[int, torch.UntypedStorage] = {}
    inside: list[dict[int, torch.UntypedStorage]] = []
    kept = outside

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return t

    def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal kept
        pack(args[0])
        kept = {}
        inside.append(kept)

    def leave(*_: Any) -> None:
        nonlocal kept
        kept = outside

    if recompute:
        for block in model.blocks:
            block.register_forward_pre_hook(enter)
            block.register_forward_hook(leave)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(tokens, positions, documents_BT=tokens if packed else None, targets_BT=tokens, weights_BT=weights)
    sizes = [sum(storage.nbytes() for storage in found.values()) for found in (outside, *inside)]
    return sizes[0] + max(sizes[1:], default=0)


def plan(
    arch: Arch,
    vocab_size: int,
    ops: Ops,
    dtype: torch.dtype,
    *,
    rows: int,
    asked: int | str,
    device: torch.device,
    n_parameters: int,
    optimizer_bytes: int,
    free: int | None = None,
    packed: bool = False,
    recompute: bool = False,
) -> MemoryPlan:
    """The micro-batch: what was asked, or the most rows that fit into `free` bytes (null = what the device has free).
    optimizer_bytes: of the state that the optimizer keeps.
    Raises ConfigError when it can't fit."""
    how = dict(packed=packed, recompute=recompute)
    one, two = (saved_bytes(arch, vocab_size, ops, dtype, n, **how) for n in (1, 2))
    saved = max(two - one, 1)
    twin = 0 if dtype == torch.float32 else 2 * dtype.itemsize
    fixed = max(one - saved, 0) + n_parameters * (MASTER_BYTES + twin) + optimizer_bytes
    per_row = saved + saved // 2  # gradients of activations live beside them
    logits = 2 * arch.vocab_rows(vocab_size) * 4  # of a token, and their gradient, in fp32
    if ops.linear_cross_entropy is not linear_cross_entropy:
        fixed += logits * min(CHUNK_TOKENS, rows * arch.model.seq_len)
    else:
        per_row += logits * arch.model.seq_len
    free = free_bytes(device) if free is None else free
    fit = int((USABLE_FRAC * free - fixed) // per_row)
    if asked == "auto":
        n_micro = math.ceil(rows / max(1, min(rows, fit)))
        micro = math.ceil(rows / n_micro)
    else:
        micro = min(int(asked), rows)
    made = MemoryPlan(micro, math.ceil(rows / micro), fixed, per_row, free)
    if made.needed_bytes > free:
        fits = "" if fit < 1 else f", or train.micro_batch={fit}"
        raise ConfigError(
            f"a step of {micro} rows needs about {gib(made.needed_bytes)}, and {gib(free)} are free on {device}",
            f"use a smaller model= or a shorter model.seq_len{fits}",
        )
    return made
