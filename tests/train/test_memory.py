"""The plan of a step's memory: counted activations against what a real step keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lmlab.errors import ConfigError
from lmlab.train import memory
from lmlab.train.device import bf16_is_native


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("extra", [["model.seq_len=16"], ["model.seq_len=1024", "attn=gqa"]])
def test_counted_activations_are_those_a_real_forward_keeps(
    trainer: Callable[..., Any], extra: list[str], precision: str
) -> None:
    if precision == "bf16" and not bf16_is_native(torch.device("cpu")):
        pytest.skip("this CPU has no native bf16")
    made = trainer(f"train.precision={precision}", "train.batch_tokens=4096", *extra)
    arch, vocab = made.exp.arch, made.prepared.tokenizer.vocab_size
    model = made.twin.model
    counted = memory.saved_bytes(arch, vocab, model.ops, next(model.parameters()).dtype, 3)
    kept: dict[int, torch.UntypedStorage] = {}
    own = {p.untyped_storage()._cdata for p in model.parameters()}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage()._cdata not in own:
            kept[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    batch = made.batches.batch(0).rows(0, 3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(batch.tokens_BT, batch.positions_BT, targets_BT=batch.targets_BT, weights_BT=batch.weights_BT)
    real = sum(s.nbytes() for s in kept.values())
    assert 0.95 * real < counted < 1.3 * real  # too few rows cost a little speed, too many the run


def plan(made: Any, monkeypatch: pytest.MonkeyPatch, free: int, asked: int | str = "auto") -> memory.MemoryPlan:
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    vocab = made.prepared.tokenizer.vocab_size
    return memory.plan(
        made.exp.arch, vocab, made.master.ops, torch.float32, rows=8,
        asked=asked, device=torch.device("cpu"), n_parameters=10_000, optimizer_bytes=80_000
    )  # fmt: skip


def test_auto_takes_the_most_rows_that_fit_in_equal_parts(
    trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer()
    assert plan(made, monkeypatch, 1 << 34).micro_rows == 8
    whole = plan(made, monkeypatch, 1 << 34)
    tight = plan(made, monkeypatch, int((whole.fixed_bytes + 5.5 * whole.per_row_bytes) / memory.USABLE_FRAC))
    assert (tight.micro_rows, tight.n_micro) == (4, 2)
    assert plan(made, monkeypatch, 1 << 34, asked=3).n_micro == 3


def test_what_can_not_fit_is_refused_with_both_figures(
    trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer()
    with pytest.raises(ConfigError, match=r"a step of 1 rows needs about .*, and 1 KiB are free on cpu") as caught:
        plan(made, monkeypatch, 1 << 10)
    assert "micro_batch" not in caught.value.hint
    whole = plan(made, monkeypatch, 1 << 34)
    tight = int((whole.fixed_bytes + 2.5 * whole.per_row_bytes) / memory.USABLE_FRAC)
    with pytest.raises(ConfigError, match="a step of 8 rows needs about") as caught:
        plan(made, monkeypatch, tight, asked=8)
    assert caught.value.hint.endswith("or train.micro_batch=2")
