"""Whole models through Triton's kernels, under the interpreter. Each function raises where something is wrong; what it
prints is JSON."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch

from lmlab.kernels import norm_triton
from tests.check.conftest import row_of
from tests.composed import grads, model, rows, same_grads

SMALL = {"n_layers": 2, "d_model": 32, "n_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "default": {"attn": "gqa"},
    "interleaved, bias": {
        "pos": ("rope", {"pairing": "interleaved", "fraction": 0.5}),
        "norm": ("layernorm", {"bias": True}),
        "block": "deepnorm",
        "ffn": "gelu",
    },
    "offset": {"norm": ("rmsnorm", {"offset": 1.0}), "block": "sandwich", "ffn": ("geglu", {"approximate": "tanh"})},
    "latents": {"attn": "mla", "ffn": ("silu", {"beta": 2.0})},
    "heads normed": {"attn": ("mha", {"qk_norm": "head"}), "block": "parallel", "ffn": "reglu"},
}


def models() -> None:
    """Gradients of whole models are those of the reference, and the operations are named for what they are."""
    for chosen in MODELS.values():
        tokens, positions = rows(2)
        eager, reference = (
            grads(model(torch.float32, kernels=name, model=SMALL, **chosen), tokens, positions, targets_BT=tokens)
            for name in ("triton", "reference")
        )
        same_grads(eager, reference, 2e-5)
    names = model(torch.float32, kernels="triton", model=SMALL).paths()
    assert names["rms_norm"] == "triton_rms_norm (asked for by name, in Triton's interpreter)"
    assert names["gates"] == "triton (asked for by name, in Triton's interpreter)"
    auto = model(torch.float32, kernels="auto", model=SMALL).paths()
    assert not [name for name in auto.values() if name.startswith("triton")]  # never on a CPU


def compiled() -> None:
    """Blocks with Triton's kernels inside are one graph each, and their gradients are those of eager code."""
    for name in ("default", "interleaved, bias"):
        eager = model(torch.float32, kernels="triton", model=SMALL | {"n_layers": 1}, **MODELS[name]).train()
        inside = copy.deepcopy(eager)
        for block in inside.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
        tokens, positions = rows(2)
        found = [grads(net, tokens, positions, targets_BT=tokens.roll(-1, 1)) for net in (inside, eager)]
        same_grads(*found, 1e-6)


def steps() -> None:
    """Losses of a few steps, by kernels."""
    losses: dict[str, list[float]] = {}
    for name in ("reference", "auto", "triton"):
        net = model(torch.float32, kernels=name, model=SMALL, attn="gqa").train()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for step in range(6):
            tokens, positions = rows(4, seed=step % 2)
            optimizer.zero_grad()
            loss = net(tokens, positions, targets_BT=tokens.roll(-1, 1)).loss / tokens.numel()
            loss.backward()
            optimizer.step()
            losses.setdefault(name, []).append(loss.item())
    print(json.dumps(losses))


def planted() -> None:
    """`lmlab check` passes, and a gradient that is 1 % off in one kernel fails its row."""
    line = "kernels=triton model.d_model=32 model.n_heads=2 model.n_layers=1"
    healthy = row_of(line, "kernels = reference")
    backward = norm_triton._norm_backward

    def faulty(*given: Any) -> None:
        backward(*given)
        given[8].mul_(1.01)  # d_weight

    norm_triton._norm_backward = faulty
    found = row_of(line, "kernels = reference")
    print(json.dumps([healthy.state, found.state, found.figure]))
