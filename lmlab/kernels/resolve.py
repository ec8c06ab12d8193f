"""Which implementation computes each operation: chosen once, before the model is built, by a fixed table and never by
timing, so that the same command takes the same path on the same kind of machine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Optional

import torch

from lmlab.errors import ConfigError
from lmlab.kernels import activation, attention, experts, flex, linear, loss, norm, rope, tiled
from lmlab.kernels import spec as specs
from lmlab.kernels.ops import Ops, triton_installed

# ---------------------------------------------------------------- what there is

PLAIN: dict[str, Any] = {
    "rms_norm": norm.rms_norm,
    "layer_norm": norm.layer_norm,
    "add_rms_norm": None,  # add, then the norm
    "add_layer_norm": None,
    "activations": activation.ACTIVATIONS,
    "gates": activation.GATES,
    "rope": {"half": rope.rotate_half, "interleaved": rope.rotate_interleaved},
    "linear_cross_entropy": loss.linear_cross_entropy,
    "embedding": linear.embedding,
    "fan": linear.fan_apart,
    "experts": experts.per_expert,
}
TORCH: dict[str, Any] = PLAIN | {
    "rms_norm": norm.fused_rms_norm,
    "layer_norm": norm.fused_layer_norm,
    "rope": PLAIN["rope"] | {"half": rope.fused_rotate_half},
    "linear_cross_entropy": loss.chunked_linear_cross_entropy,
    "fan": linear.fan_packed,
    "experts": experts.grouped,
}
ADDED = {"add_rms_norm": norm.add_rms_norm, "add_layer_norm": norm.add_layer_norm}


@functools.cache
def _triton() -> dict[str, Any]:
    """Those that there is a Triton kernel for. Imported here: lmlab runs without Triton."""
    from lmlab.kernels import activation_triton, loss_triton, norm_triton, rope_triton

    return {
        "rms_norm": norm_triton.triton_rms_norm,
        "layer_norm": norm_triton.triton_layer_norm,
        "add_rms_norm": norm_triton.triton_add_rms_norm,
        "add_layer_norm": norm_triton.triton_add_layer_norm,
        "activations": activation_triton.TRITON_ACTIVATIONS,
        "gates": activation_triton.TRITON_GATES,
        "rope": {"half": rope_triton.triton_rotate_half, "interleaved": rope_triton.triton_rotate_interleaved},
        "linear_cross_entropy": loss_triton.triton_linear_cross_entropy,
    }


# ---------------------------------------------------------------- what is preferred

IN_BLOCKS = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "activations", "gates", "rope")
LOSS = ("linear_cross_entropy",)
ALL = tuple(PLAIN)


class Row(NamedTuple):
    """For these roles that path, and why. The first row that fits holds; "" fits everything."""

    kernels: str
    device: str  # cpu, cuda, or `cuda without Triton`
    dtype: str  # half, or wide: float32 and float64
    blocks: str  # eager or compiled
    roles: tuple[str, ...]
    path: str  # plain, torch (in few passes), triton, or inside: plain in compiled blocks, the best one outside
    why: str


NAMED, NONE_OWN, ONE_PASS = "asked for by name", "no Triton kernel for it", "eager torch reads and writes at every step"
CHUNKS = "never the logits of the whole batch"
INTERPRETED = "asked for by name, in Triton's interpreter"
FUSED, NO_CPU = "the compiler fuses the plain formula", "Triton does not run on a CPU"
TABLE = (
    Row("reference", "", "", "", ALL, "plain", NAMED),
    Row("triton", "", "", "", (*IN_BLOCKS, *LOSS), "triton", NAMED),
    Row("triton", "", "", "", ALL, "torch", NONE_OWN),
    Row("auto", "cpu", "", "compiled", IN_BLOCKS, "inside", FUSED),
    Row("auto", "cpu", "wide", "eager", ("layer_norm",), "plain", "torch's own is one pass"),
    Row("auto", "cpu", "", "", ALL, "torch", NO_CPU),
    Row("auto", "cuda", "", "", LOSS, "triton", CHUNKS),
    Row("auto", "cuda", "", "eager", IN_BLOCKS, "triton", ONE_PASS),
    Row("auto", "cuda", "", "compiled", IN_BLOCKS, "inside", FUSED),
    Row("auto", "cuda", "", "", ALL, "torch", NONE_OWN),
    Row("auto", "", "", "compiled", IN_BLOCKS, "inside", FUSED),
    Row("auto", "", "", "", ALL, "torch", "Triton is not at hand"),
)
WORDS = {"plain": "plain torch", "torch": "torch in few passes", "triton": "Triton", "inside": "plain torch in blocks"}


def preferred(kernels: str, device: str, dtype: torch.dtype, *, compiled: bool) -> dict[str, Row]:
    """The row of TABLE that holds for each role."""
    asked = kernels, device, "half" if dtype.itemsize < 4 else "wide", "compiled" if compiled else "eager"
    fits = [row for row in TABLE if all(want in ("", have) for want, have in zip(row[:4], asked, strict=True))]
    return {role: next(row for row in fits if role in row.roles) for role in ALL}


# ---------------------------------------------------------------- what can run


def interpreted() -> bool:
    """Whether Triton's kernels are run by its interpreter, on any device and slowly: TRITON_INTERPRET=1."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def why_not(kernels: specs.Spec, device: torch.device | str) -> Optional[ConfigError]:
    """Why these kernels can't run on the device; None where they can."""
    if not isinstance(kernels, specs.Triton):
        return None
    if not triton_installed():
        return ConfigError(
            "`kernels` is triton, and the package triton is not installed", "pip install triton, or use kernels=auto"
        )
    if torch.device(device).type == "cuda" or interpreted():
        return None
    return ConfigError(
        f"`kernels` is triton, and Triton does not run on `device` {device}",
        "use kernels=auto; TRITON_INTERPRET=1 before the command runs them in Triton's interpreter, slowly, for tests",
    )


def on_cpu(kernels: specs.Spec) -> specs.Spec:
    """What stands for these kernels where a model is looked at on the CPU: auto's for Triton's, which do not run there,
    or for minutes, interpreted."""
    return specs.Auto() if isinstance(kernels, specs.Triton) else kernels


def resolve(
    kernels: specs.Spec,
    device: torch.device | str,
    dtype: torch.dtype,
    residual_dtype: Optional[torch.dtype] = None,
    *,
    compiled: bool = False,
) -> Ops:
    """The operations of `kernels=…`. residual_dtype: of the sum that blocks add to, where it is not `dtype`. compiled:
    whether torch.compile takes the blocks. Raises ConfigError where what is asked for by name can't run."""
    if error := why_not(kernels, device):
        raise error
    device = torch.device(device)
    usable = device.type == "cuda" and triton_installed() and not interpreted()
    where = "cuda without Triton" if device.type == "cuda" and not usable else device.type
    rows = preferred(kernels.name, where, dtype, compiled=compiled)
    if isinstance(kernels, specs.Triton) and interpreted():
        rows = {role: row._replace(why=INTERPRETED) if row.path == "triton" else row for role, row in rows.items()}
    chosen = {role: _chosen(role, row.path, usable) for role, row in rows.items()}
    return Ops(
        **chosen,
        render={
            "dense": attention.render_dense,
            "sdpa": attention.render_sdpa,
            "tiled": tiled.render_tiled,
            "flex": flex.render_flex,
        },
        attention={"dense": attention.dense, "sdpa": attention.sdpa, "tiled": tiled.tiled, "flex": flex.flex},
        attention_default="dense" if isinstance(kernels, specs.Reference) else None,
        names={role: _name(chosen[role], row) for role, row in rows.items() if chosen[role] is not None},
        said=_said({role: row for role, row in rows.items() if chosen[role] is not None}),
        device=device,
        dtype=dtype,
        residual_dtype=residual_dtype,
    )


def _chosen(role: str, path: str, usable: bool) -> Any:
    if path in ("plain", "torch"):
        return (PLAIN if path == "plain" else TORCH)[role]
    fast = TORCH | _triton() if usable or path == "triton" else TORCH
    if path == "triton" or fast[role] is None:
        return fast[role]
    inside = (PLAIN | ADDED)[role]
    if isinstance(inside, Mapping):
        return {name: _inside(inside[name], fast[role][name]) for name in inside}
    return _inside(inside, fast[role])


def _inside(plain: Callable[..., Any], fast: Callable[..., Any]) -> Callable[..., Any]:
    """`plain` in compiled code, `fast` outside of it."""

    @functools.wraps(plain)
    def chosen(*given: Any, **settings: Any) -> Any:
        return (plain if torch.compiler.is_compiling() else fast)(*given, **settings)

    return chosen


def _name(chosen: Any, row: Row) -> str:
    """`fused_rms_norm (why)`; of several functions together the path."""
    return f"{row.path if isinstance(chosen, Mapping) else chosen.__name__} ({row.why})"


def _said(rows: Mapping[str, Row]) -> str:
    """`Triton for rms_norm, rope (why), torch in few passes for the rest (why)`."""
    of: dict[tuple[str, str], list[str]] = {}
    for role, row in rows.items():
        of.setdefault((row.path, row.why), []).append(role)
    *others, (rest, why) = sorted(of, key=lambda one: "embedding" in of[one])
    told = [f"{WORDS[path]} for {', '.join(of[path, because])} ({because})" for path, because in others]
    return ", ".join([*told, f"{WORDS[rest]}{' for the rest' if told else ''} ({why})"])
