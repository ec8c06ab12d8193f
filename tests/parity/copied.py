"""One function from two sources: our parameters picked out of another implementation's, then logits, loss, gradients.

`transformers` keeps norms, softmax, cos, sin and the loss in fp32 whatever the model is in; under `Wide` these are
float64 as well, so that what remains is rounding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lmlab.config.load import load
from lmlab.interop.names import Row, pairs
from lmlab.interop.tensors import ours_of
from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto
from lmlab.model.spec import Arch
from lmlab.model.transformer import Transformer, build
from tests.composed import VOCAB, close, grads, rows, same_grads

Table = Callable[[Arch], Sequence[Row]]  # as lmlab/interop has it
D, H, L = 64, 4, 2
MEMORY = {r"in_proj_(weight|bias)$": r"in_proj.\1", "embed_out": "lm_head", "block_sparse_moe": "mlp"}
MEMORY |= {
    rf"(experts\.\d+\.){file}\.": rf"\1{name}_proj." for file, name in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
}
SIZES = {"model.n_layers": L, "model.d_model": D, "model.n_heads": H, "model.seq_len": 16}


class Wide(TorchFunctionMode):
    """float32 that is asked for, by name or by default, becomes float64."""

    def __enter__(self) -> Any:
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self.default)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*(torch.float64 if a is torch.float32 else a for a in args), **named)


def drawn(make: Callable[[], nn.Module]) -> nn.Module:
    """Another implementation in float64, with weights so large that attention is peaked, biases and norms too."""
    with Wide():
        net = make().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(std=0.3, generator=generator) if p.ndim > 1 else p.uniform_(-0.5, 1.5, generator=generator)
        for name, b in net.named_buffers():
            if name.endswith("e_score_correction_bias"):  # of the size of the scores, so that it changes choices
                b.uniform_(-0.5, 0.5, generator=generator)
    assert {p.dtype for p in net.parameters()} == {torch.float64}
    return net


def composed(*words: str) -> Transformer:
    """Our model in float64, of the options' own files, with small sizes where `words` give none."""
    given = {word.partition("=")[0] for word in words}
    sizes = [f"{key}={value}" for key, value in SIZES.items() if key not in given]
    arch = load([*words, *sizes]).experiment.arch
    ops = resolve(Auto(), "cpu", torch.float64)
    return build(arch, VOCAB, ops, seed=0, device="cpu", dtype=torch.float64).eval()


def picked(ours: Transformer, table: Table, source: dict[str, Tensor]) -> dict[str, Tensor]:
    """Ours by name out of theirs; each of theirs has to be used."""
    shapes = {name: p.shape for name, p in ours.named_parameters()}
    rows = pairs(table(ours.arch), shapes, ours.dims.n_layers)
    source = {_whole(name): tensor for name, tensor in source.items()}
    found = dict(part for p in rows for part in ours_of(p, lambda name: source[_whole(name)]))
    assert {name: p.shape for name, p in found.items()} == shapes
    assert {_whole(name) for p in rows for name in p.theirs} == source.keys()
    return found


def _whole(name: str) -> str:
    """torch joins `in_proj_weight`; files call NeoX's head and Mixtral's experts by other names than transformers."""
    for file, memory in MEMORY.items():
        name = re.sub(file, memory, name)
    return name


def agree(
    ours: Transformer, theirs: nn.Module, table: Table, T: int = 16, tol: float = 1e-10, without: str | None = None
) -> None:
    """Logits, loss and every gradient. `without`: theirs that are set to 0, having no counterpart."""
    weights = dict(theirs.named_parameters())
    steered(ours, theirs)
    kept = {n for n in weights if without is None or not re.search(without, n)}
    with torch.no_grad():
        for p in (weights[n] for n in weights.keys() - kept):
            p.zero_()
        for own, value in picked(ours, table, as_in_files({n: weights[n] for n in kept})).items():
            ours.get_parameter(own).copy_(value)
    tokens, positions = rows(2, T)
    with Wide():
        out = theirs(tokens)
        logits = out if isinstance(out, Tensor) else out.logits
    assert logits.dtype == torch.float64
    close(ours(tokens, positions).logits_BTV.detach(), logits.detach(), tol)
    nats = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    nats.backward()
    # whole rows, the last target without weight: some scalings ask for the row's length
    asked = dict(targets_BT=tokens.roll(-1, 1), weights_BT=(positions < T - 1).double())
    close(ours(tokens, positions, **asked).loss.detach(), nats.detach(), tol)
    ours_grads = grads(ours, tokens, positions, **asked)
    theirs_grads = picked(ours, table, as_in_files({n: weights[n].grad for n in kept}))
    same_grads(without_rounding(ours_grads), without_rounding(theirs_grads), tol)


@torch.no_grad()
def steered(ours: Transformer, theirs: nn.Module) -> None:
    """The biases that steer DeepSeek's choice, which are no parameters."""
    for name, bias in ours.named_buffers():
        if name.endswith("router.bias"):
            bias.copy_(theirs.get_buffer(f"model.layers.{name.split('.')[1]}.mlp.gate.e_score_correction_bias"))


def as_in_files(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts that lie in one tensor, (E, 2F, D) gate over up and (E, D, F), each by its own name."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        at, _, kind = name.partition(".experts.")
        if kind == "gate_up_proj":
            for which, part in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
                found |= {f"{at}.experts.{e}.{which}_proj.weight": w for e, w in enumerate(part)}
        elif kind == "down_proj":
            found |= {f"{at}.experts.{e}.down_proj.weight": w for e, w in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def without_rounding(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients but those that are 0 but for rounding, as a bias of k has it that is not rotated."""
    norms = {name: grad.norm().item() for name, grad in found.items()}
    return {name: grad for name, grad in found.items() if norms[name] > 1e-12 * max(norms.values())}
