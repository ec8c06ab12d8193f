"""A step asks nothing of the device: no value of a tensor is looked at on the way. Held on the CPU by the operations
that would wait for an accelerator; experts are computed as they are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmlab.data.prefetch import ahead
from lmlab.kernels import experts
from lmlab.kernels.resolve import resolve
from lmlab.model import attn, pos
from lmlab.train.setup import Trainer

WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "equal",
    "_unique2",
    "repeat_interleave.Tensor",
)
CASES = {
    "dense": [],
    "t5": ["pos=t5", "data.packing=documents"],
    "accumulated": ["model.dropout=0.1", "attn=gqa", "norm=layernorm", "data.packing=documents"],
    "dropless": ["moe=topk", "moe.n_experts=4", "moe.z_coef=1e-3"],
    "aux_free": ["moe=topk", "moe.n_experts=4", "moe.balance=aux_free", "ffn.bias=true"],
    "capacity": ["moe=switch", "moe.n_experts=4"],
    "expert_choice": ["moe=expert_choice", "moe.n_experts=4"],
    "muon": ["optim=muon", "moe=topk", "moe.n_experts=4"],
    "lion": ["optim=lion", "train.activation_checkpointing=blocks"],
    "fp16": ["train.precision=fp16", "train.residual_dtype=fp32"],
}


class Watched(TorchDispatchMode):
    """Names of the operations that need a value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        indexed = name.startswith("index.") and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name.startswith(WAITING) or indexed:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_the_watch_sees_what_waits() -> None:
    x = torch.arange(4.0)
    with Watched() as watched:
        float(x.sum())
        x[x > 1]
        x.nonzero()
        if x[0]:
            raise AssertionError
    assert len(watched.found) == 4


def uncompared(positions_BT: torch.Tensor) -> torch.Tensor:
    """`shared_row` as it is on CUDA, where values are not compared."""
    return positions_BT[:1] if positions_BT.stride(0) == 0 else positions_BT


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", ["dense", "accumulated", "dropless", "aux_free", "expert_choice", "lion"])
def test_a_step_on_cuda_waits_for_nothing(trainer: Callable[..., Any], case: str) -> None:
    """The same by CUDA itself, with batches made ahead. (fp16 experts: torch's grouped_mm waits. Muon in fp16 does.)"""
    made, device = trainer(*CASES[case], micro_rows=4), torch.device("cuda")
    how = dict(ops=resolve(made.exp.kernels, device, torch.bfloat16), device=device, dtype=torch.bfloat16)
    made = Trainer.make(made.exp, made.prepared, micro_rows=4, compiled=False, **how)
    with ahead(made.batches, device, 4) as batches:
        made.stepper(batches(0), step=0, lr=1e-3)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in range(1, 4):
                batch = batches(step)
                assert batch.tokens_BT.is_pinned()
                loss, _ = made.stepper(batch, step=step, lr=1e-3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(loss)


@pytest.mark.parametrize("case", CASES)
def test_a_step_looks_at_no_value(trainer: Callable[..., Any], case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "rows_by_expert", experts.by_grouped_mm)  # as on CUDA: no `tolist`
    for module in (attn, pos):
        monkeypatch.setattr(module, "shared_row", uncompared)
    made = trainer(*CASES[case], micro_rows=4)
    for step in range(2):  # the first makes the optimizer's state
        batch = made.batches.batch(step)
        weight = batch.weight()  # of a batch on the host
        monkeypatch.setattr(type(batch), "weight", lambda _, weight=weight: weight)
        with Watched() as watched:
            made.stepper(batch, step=step, lr=1e-3)
    assert watched.found == []
