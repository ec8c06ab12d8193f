"""Small models for the tests, composed from the registry; and weights on which attention is peaked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmlab.check import composed
from lmlab.kernels.resolve import resolve
from lmlab.model import spec as specs
from lmlab.model.transformer import Transformer, build
from lmlab.registry import OPTIONS

VOCAB = 97
MODEL_GROUPS = ("norm", "block", "pos", "rope_scaling", "attn", "ffn")
DEFAULT = {"norm": "rmsnorm", "block": "prenorm", "pos": "rope", "rope_scaling": "none", "attn": "mha", "ffn": "swiglu"}
SIZES = {"n_layers": 2, "d_model": 64, "n_heads": 4, "seq_len": 16}


def arch(**chosen: Any) -> specs.Arch:
    """arch(norm="layernorm", attn=("gqa", {"window": 3}), model={"n_layers": 1}); the rest is the default."""
    sizes = SIZES | chosen.pop("model", {})
    parts = {}
    for group, choice in (DEFAULT | chosen).items():
        name, fields = (choice, {}) if isinstance(choice, str) else choice
        parts[group] = OPTIONS[group][name](**fields)
    return specs.Arch(model=specs.Decoder(**sizes), **parts)


def model(
    dtype: torch.dtype = torch.float64, *, kernels: str = "auto", seed: int = 0, vocab: int = VOCAB, **chosen: Any
) -> Transformer:
    """A drawn model on the CPU, in eval mode."""
    ops = resolve(OPTIONS["kernels"][kernels](), "cpu", dtype)
    return build(arch(**chosen), vocab, ops, seed=seed, device="cpu", dtype=dtype).eval()


def rows(B: int = 2, T: int = 16, *, vocab: int = VOCAB, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random tokens (B, T) and their positions."""
    tokens = torch.randint(vocab, (B, T), generator=torch.Generator().manual_seed(seed))
    return tokens, torch.arange(T).expand(B, T)


def peaked(net: Transformer, T: int = 16) -> Transformer:
    """The model with q scaled until the mean largest attention weight of the last row is at least 0.5."""
    _, why_not = composed.peaked(net, composed.Rows(*rows(2, T, vocab=net.dims.vocab_size)), 1e6)
    assert not why_not, why_not
    return net


def close(a: Tensor, b: Tensor, tol: float = 1e-10) -> None:
    """max |a − b| over max(1, max |b|), as SEMANTICS of equal routes has it."""
    assert a.shape == b.shape
    error = ((a - b).abs().max() / max(1.0, b.abs().max().item())).item()
    assert error <= tol, f"off by {error:.3g}, allowed {tol:g}"


def grads(net: Transformer, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """The gradient of the loss by parameter name."""
    net.zero_grad(set_to_none=True)
    net(*args, **kwargs).loss.backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def same_grads(a: dict[str, Tensor], b: dict[str, Tensor], tol: float) -> None:
    """‖a − b‖ / ‖b‖ per tensor."""
    assert a.keys() == b.keys()
    off = {n: ((a[n].double() - b[n].double()).norm() / b[n].double().norm().clamp_min(1e-12)).item() for n in a}
    worst = max(off, key=lambda name: off[name])
    assert off[worst] <= tol, f"{worst} is off by {off[worst]:.3g}, allowed {tol:g}"
