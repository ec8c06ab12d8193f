"""Activation checkpointing changes the memory and nothing else: losses, figures and weights to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmlab.train import memory
from lmlab.train.twin import Twin

CASES = {
    "dropout": ["model.dropout=0.2", "attn.dropout=0.1"],
    "batchnorm": ["norm=batchnorm", "model.dropout=0.1"],
    "moe": ["moe=topk", "moe.n_experts=4", "moe.jitter=0.1", "moe.balance=aux_free", "model.dropout=0.1"],
    "documents": ["data.packing=documents", "pos=t5", "attn=gqa", "norm=layernorm"],
}


def trained(made: Any, dtype: torch.dtype, steps: int = 4) -> tuple[Any, ...]:
    recompute = made.twin.model.recompute
    made.twin = made.stepper.twin = Twin(made.master, dtype)
    made.twin.model.recompute = recompute
    rows = [made.stepper(made.batches.batch(k), step=k, lr=1e-3) for k in range(steps)]
    figures = made.stepper.routing.figures()
    return [(float(a), float(b)) for a, b in rows], figures, made.master.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_bits_are_the_same_with_and_without(trainer: Callable[..., Any], case: str, dtype: torch.dtype) -> None:
    plain = trained(trainer(*CASES[case], micro_rows=4), dtype)
    made = trainer(*CASES[case], "train.activation_checkpointing=blocks", micro_rows=4)
    assert made.twin.model.recompute
    again = trained(made, dtype)
    assert again[:2] == plain[:2]
    assert again[2].keys() == plain[2].keys()
    for name, value in plain[2].items():
        assert torch.equal(value, again[2][name]), name


class Kept(TorchDispatchMode):
    """The most bytes of tensors that live at once, of those made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import weakref

        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and (s := t.untyped_storage())._cdata not in self.live:
                self.live[s._cdata] = s.nbytes()
                weakref.finalize(s, self.live.pop, s._cdata, None)
        self.most = max(self.most, sum(self.live.values()))
        return out


def test_less_is_kept_and_the_plan_knows_it(trainer: Callable[..., Any]) -> None:
    """Of 8 layers the inputs and one layer's insides: the plan's count against the bytes that really lived."""
    sizes = ["model.n_layers=8", "model.seq_len=64", "train.batch_tokens=1024"]
    most, counted = {}, {}
    for way in ("none", "blocks"):
        made = trainer(*sizes, f"train.activation_checkpointing={way}", micro_rows=16)
        batch = made.batches.batch(0)
        made.stepper.gradients(batch, step=0)
        with Kept() as kept:
            made.stepper.gradients(batch, step=0)
        most[way] = kept.most
        vocab, ops = made.prepared.tokenizer.vocab_size, made.master.ops
        counted[way] = memory.saved_bytes(made.exp.arch, vocab, ops, torch.float32, 16, recompute=way == "blocks")
    assert counted["blocks"] < 0.4 * counted["none"]
    assert most["blocks"] < 0.5 * most["none"]
    for way in most:
        assert 0.8 * counted[way] < most[way] < 1.6 * counted[way], (way, most, counted)


def test_evaluation_and_caches_know_nothing_of_it(trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr("lmlab.model.transformer.recomputed", never)
    made = trainer("train.activation_checkpointing=blocks")
    assert made.loss_on(made.prepared.val, 64).tokens == 64
    with pytest.raises(AssertionError, match="computed again"):
        made.stepper(made.batches.batch(0), step=0, lr=1e-3)


def test_compiled_blocks_are_computed_again(trainer: Callable[..., Any]) -> None:
    """The same losses but for rounding: a compiler may fuse the second forward otherwise."""
    losses = {}
    for way in ("none", "blocks"):
        made = trainer("model.dropout=0.1", f"train.activation_checkpointing={way}")
        made.twin.model.compile_blocks()
        losses[way] = [float(made.stepper(made.batches.batch(k), step=k, lr=1e-3)[0]) for k in range(3)]
    assert losses["blocks"] == pytest.approx(losses["none"], rel=1e-5)
