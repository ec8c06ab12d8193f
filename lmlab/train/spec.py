"""Optimizers, schedules and how long to train, torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Optional, Union

from lmlab.registry import Spec, option, setting

DEFAULT_STEPS = 300


@dataclass
class OptimSpec(Spec):
    """What all optimizers share."""

    lr: float = setting(3e-3, "peak learning rate", gt=0, probe=1e-3)
    weight_decay: float = setting(0.1, "decoupled decay of matrices and embeddings; none on vectors", ge=0, probe=0.5)
    clip: Optional[float] = setting(1.0, "largest norm of the whole gradient; null = no clipping", gt=0, probe=1e-9)

    def moments(self, name: str, ndim: int) -> int:
        """fp32 numbers that are kept between steps for each of a parameter's, for the plan of memory."""
        return 2


@option("optim", "adamw", build="lmlab.train.optim:adamw")
class AdamW(OptimSpec):
    betas: list[float] = setting([0.9, 0.95], "decay of the two moments", ge=0, lt=1, probe=[0.8, 0.9])
    eps: float = setting(1e-8, "added to the root of the second moment", gt=0, probe=1e-2)


@option("optim", "muon", build="lmlab.train.muon:Muon")
class Muon(OptimSpec):
    """AdamW's fields are of the half that AdamW moves; lr and weight_decay are of both."""

    lr: float = setting(1e-2, "peak learning rate", gt=0, probe=1e-3)
    momentum: float = setting(0.95, "decay of the momentum of matrices in attention and ffn", gt=0, lt=1, probe=0.5)
    nesterov: bool = setting(True, "look ahead by the gradient once more", probe=False)
    ns_steps: int = setting(5, "Newton-Schulz steps towards an orthogonal update", ge=1, le=99, probe=2)
    betas: list[float] = setting([0.9, 0.95], "decay of AdamW's two moments", ge=0, lt=1, probe=[0.8, 0.9])
    eps: float = setting(1e-8, "added to the root of AdamW's second moment", gt=0, probe=1e-2)

    def moves(self, name: str, ndim: int) -> bool:
        """Whether the parameter is Muon's: a map inside attention or ffn, (out, in), or the stacked ones of experts,
        (E, out, in). A router is AdamW's: its rows are logits of a choice, as the head's are, and equal singular values
        would make every expert as sharply chosen as any other."""
        inside = re.match(r"blocks\.\d+\.(attn|ffn)\.", name) is not None
        shaped = ndim == 2 or (ndim == 3 and ".experts." in name)
        return inside and shaped and not name.endswith((".bias", "router.weight"))

    def moments(self, name: str, ndim: int) -> int:
        return 1 if self.moves(name, ndim) else 2


@option("optim", "lion", build="lmlab.train.lion:Lion")
class Lion(OptimSpec):
    lr: float = setting(1e-3, "peak learning rate", gt=0, probe=1e-4)
    weight_decay: float = setting(0.3, "decoupled decay of matrices and embeddings; none on vectors", ge=0, probe=0.5)
    betas: list[float] = setting(
        [0.9, 0.99], "decay of the momentum that steps, and of the one that is kept", ge=0, lt=1, probe=[0.8, 0.9]
    )

    def moments(self, name: str, ndim: int) -> int:
        return 1


@dataclass
class ScheduleSpec(Spec):
    warmup_steps: Optional[int] = setting(None, "linear warm-up; null = 5 % of the steps", ge=0, probe=7)


def warmup_steps(asked: Optional[int], steps: int) -> int:
    """Warm-up steps asked for, or 5 % of the run (at least 1)."""
    return asked if asked is not None else max(1, round(0.05 * steps))


@option("schedule", "cosine", build="lmlab.train.schedule:cosine")
class Cosine(ScheduleSpec):
    min_lr_frac: float = setting(0.1, "last learning rate over the peak", ge=0, le=1, probe=0.5)


@option("schedule", "linear", build="lmlab.train.schedule:linear")
class Linear(ScheduleSpec):
    min_lr_frac: float = setting(0.1, "last learning rate over the peak", ge=0, le=1, probe=0.5)


@option("schedule", "wsd", build="lmlab.train.schedule:wsd")
class WSD(ScheduleSpec):
    """Warm-up, stable, decay."""

    min_lr_frac: float = setting(0.1, "last learning rate over the peak", ge=0, le=1, probe=0.5)
    decay_frac: float = setting(0.2, "share of the steps in the final linear decay", gt=0, le=1, probe=0.5)


@option("schedule", "constant", build="lmlab.train.schedule:constant")
class Constant(ScheduleSpec):
    pass


@dataclass
class Train:
    """How much to train and how often to look. Of several max_*, the first reached ends the run; none = 300 steps."""

    batch_tokens: int = setting(4096, "tokens per optimizer step; a multiple of model.seq_len", ge=1, probe=2048)
    micro_batch: Union[int, str] = setting(
        "auto", "rows at once (a number), or auto = the most that fit", choices=("auto",), ge=1, probe=4
    )
    max_steps: Optional[int] = setting(None, "optimizer steps; without any max_*: 300", ge=1, probe=20)
    max_tokens: Optional[int] = setting(None, "tokens seen", ge=1, probe=8192)
    max_flops: Optional[float] = setting(None, "training FLOPs", gt=0, le=1e40, probe=1e12)
    max_minutes: Optional[float] = setting(
        None, "minutes; becomes a step count from the measured rate before step 0", gt=0, le=1e9
    )
    precision: str = setting(
        "auto",
        "of the computed model; masters are fp32; auto = bf16 where native",
        choices=("auto", "fp32", "bf16", "fp16"),
        probe="fp32",
    )
    residual_dtype: str = setting(
        "compute",
        "of the sum that blocks add to: compute = as train.precision; fp32 = wider than a half precision",
        choices=("compute", "fp32"),
        probe="fp32",
        since=5,
    )
    # Part of a run's identity: eager blocks give the same bits twice, compiled ones may be fused otherwise.
    activation_checkpointing: str = setting(
        "none",
        "blocks = keep what enters a block alone, compute the rest again in backward: less memory, a third slower",
        choices=("none", "blocks"),
        probe="blocks",
        since=5,
    )
    eval_every_steps: Optional[int] = setting(
        None, "validate every so many steps; null = a quarter of the run", ge=1, identity=False
    )
    eval_tokens: Optional[int] = setting(
        32768, "validation tokens at intervals (the last evaluation takes all); null = all", ge=1, identity=False
    )
    checkpoint_every_steps: Optional[int] = setting(
        None, "save every so many steps; null = when evaluating", ge=1, identity=False
    )
    keep_last: int = setting(2, "checkpoints kept besides the best", ge=1, identity=False)
    log_every_steps: int = setting(10, "a row of metrics every so many steps", ge=1, identity=False)
    probe_every_steps: Optional[int] = setting(
        None,
        "look inside every so many steps, per layer: activations, attention, gradients, updates; null = never",
        ge=1,
        identity=False,
        since=2,
    )
