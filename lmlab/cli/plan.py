"""Everything that is known before the first step: data, device, model, memory, steps, time. Writes nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lmlab.cli.run_one import Share
from lmlab.config.load import Start
from lmlab.config.tree import Experiment
from lmlab.cost.flops import active_parameters, flops_per_token, palm_flops_per_token
from lmlab.data.source import Source
from lmlab.errors import ConfigError
from lmlab.kernels.resolve import Ops, resolve, why_not
from lmlab.model.transformer import Transformer
from lmlab.train import memory
from lmlab.train import start as starting
from lmlab.train.device import compile_wanted, resolve_device, resolve_precision, resolve_residual
from lmlab.train.loop import measured_rate
from lmlab.train.optim import state_bytes
from lmlab.train.setup import Trainer
from lmlab.train.spec import DEFAULT_STEPS, Train, warmup_steps
from lmlab.train.start import Taken

STEP_OVER_GRADIENT = 1.08  # a whole step over its gradients: optimizer, twin, bookkeeping


@dataclass
class Plan:
    exp: Experiment
    prepared: Source
    device: torch.device
    dtype: torch.dtype
    ops: Ops
    compiled: bool
    skeleton: Transformer  # on the meta device: counts only
    flops_per_token: float
    palm_flops_per_token: float
    memory: memory.MemoryPlan
    steps: int | None  # None: max_minutes waits for a measured rate
    vocab_size: int  # what is predicted; the embedding may have more rows
    taken: list[Taken] = field(default_factory=list)  # of the run that this one starts from, when it is yet to start

    @property
    def n_parameters(self) -> int:
        return sum(p.numel() for p in self.skeleton.parameters())

    @property
    def n_active(self) -> int:
        """Of the parameters those that one token meets: of experts as many as it goes through."""
        return round(active_parameters(self.skeleton, self.exp.arch))

    @property
    def epochs(self) -> float:
        """How often the run reads what there is; 0 until the steps are known."""
        return self.prepared.epochs((self.steps or 0) * self.exp.train.batch_tokens)

    def evaluate_every(self, steps: int) -> int:
        """Steps between evaluations of a run of `steps`: what was asked, or a quarter of it."""
        return self.exp.train.eval_every_steps or max(1, math.ceil(steps / 4))

    def machine(self) -> str:
        """`cpu bfloat16 eager`."""
        how = "compiled" if self.compiled else "eager"
        wide = "" if self.ops.residual_dtype is None else ", residual float32"
        again = ", blocks computed again in backward" if self.recompute else ""
        return f"{self.device} {str(self.dtype).removeprefix('torch.')} {how}{wide}{again}"

    @property
    def recompute(self) -> bool:
        """Whether of a block only what enters it is kept."""
        return self.exp.train.activation_checkpointing == "blocks"

    def kernels(self) -> dict[str, str]:
        """The implementation behind each operation."""
        return {**self.ops.names, **self.skeleton.paths()}

    def resolved(self) -> dict[str, Any]:
        """What `auto` and null became; recorded, and used again by resume and verify."""
        return {
            "device": str(self.device),
            "precision": str(self.dtype).removeprefix("torch."),
            "micro_batch": self.memory.micro_rows,
            "steps": self.steps,
            "warmup_steps": warmup_steps(self.exp.schedule.warmup_steps, self.steps or 1),
            "compile": self.compiled,
            "residual_dtype": str(self.ops.residual_dtype or self.dtype).removeprefix("torch."),
            "activation_checkpointing": self.exp.train.activation_checkpointing,
            "kernels": self.kernels(),
        }


def make(
    exp: Experiment,
    prepared: Source,
    recorded: Mapping[str, Any] | None = None,
    share: Share | None = None,
    start: Start | None = None,
) -> Plan:
    """`recorded`: the manifest of an earlier part of the same run. Its steps, micro-batch, precision and compilation
    hold, and its device unless another is asked for: a run does not change its arithmetic on the way. `start`: what
    the run's weights will be taken from. Raises ConfigError, RunError."""
    recorded = recorded or {}
    known: dict[str, Any] = recorded.get("resolved") or {}
    device = resolve_device(known["device"] if known and exp.device == "auto" else exp.device)
    dtype = getattr(torch, known["precision"]) if known else resolve_precision(exp.train.precision, device)
    compiled = known.get("compile", compile_wanted(exp.compile, device))
    ops = resolve(exp.kernels, device, dtype, residual_of(exp.train, dtype), compiled=compiled)
    theirs = None if start is None else starting.shapes(start.checkpoint)
    vocab_size = exp.arch.vocab_size(prepared.tokenizer.vocab_size, rows_of(prepared, recorded, theirs))
    with torch.device("meta"):
        skeleton = Transformer(exp.arch, vocab_size, ops)
    taken = [] if start is None or theirs is None else weights(exp, start, theirs, skeleton).taken
    flops, palm = flops_per_token(skeleton, exp.arch), palm_flops_per_token(skeleton, exp.arch)
    needs = memory.plan(
        exp.arch,
        vocab_size,
        ops,
        dtype,
        rows=exp.train.batch_tokens // exp.model.seq_len,
        asked=known.get("micro_batch", exp.train.micro_batch),
        device=device,
        n_parameters=sum(p.numel() for p in skeleton.parameters()),
        optimizer_bytes=state_bytes(exp.optim, skeleton),
        free=free_bytes(device, share or Share()),
        packed=exp.data.packing == "documents",
        recompute=exp.train.activation_checkpointing == "blocks",
    )
    steps = known.get("steps", counted_steps(exp.train, flops))
    return Plan(exp, prepared, device, dtype, ops, compiled, skeleton, flops, palm, needs, steps, vocab_size, taken)


def residual_of(train: Train, dtype: torch.dtype) -> torch.dtype | None:
    """What the residual is kept in where that is not `dtype`. Raises ConfigError when wider was asked for and isn't."""
    found = resolve_residual(train.residual_dtype, dtype)
    if train.residual_dtype == "fp32" and found is None:
        raise ConfigError(
            f"`train.residual_dtype` is fp32, and so is what `train.precision` {train.precision} computes in here: "
            "it would do nothing",
            "leave it out, or use train.precision=bf16 or fp16",
        )
    return found


def check_kernels(exp: Experiment) -> None:
    """Raises ConfigError when kernels that are asked for by name can't run on the device."""
    if error := why_not(exp.kernels, resolve_device(exp.device)):
        raise error


def rows_of(prepared: Source, recorded: Mapping[str, Any], source: Mapping[str, torch.Tensor] | None) -> int:
    """A row per id, or those of the weights it starts from, which may be more."""
    if source is not None:
        return len(source[starting.EMBEDDING])
    return int((recorded.get("lineage") or {}).get("vocab_size", prepared.tokenizer.vocab_size))


def weights(
    exp: Experiment, start: Start, source: Mapping[str, torch.Tensor], skeleton: Transformer
) -> starting.Weights:
    """What the experiment starts with, of the source's state. On meta: only what would become of it."""
    seed = exp.seeds()["init"]
    return starting.started(source, start.arch, exp.arch, skeleton, resize=exp.init.resize, seed=seed)


def free_bytes(device: torch.device, share: Share) -> int:
    """What a run may use of the device's memory."""
    if device.type == "cpu" and share.host_bytes is not None:
        return share.host_bytes
    return memory.part_of(device, share.parts)


def counted_steps(train: Train, flops: float) -> int | None:
    """The fewest steps any of the max_* allows; DEFAULT_STEPS without one; None when only minutes are given."""
    limits = [
        train.max_steps,
        train.max_tokens and train.max_tokens / train.batch_tokens,
        train.max_flops and train.max_flops / (flops * train.batch_tokens),
    ]
    given = [float(limit) for limit in limits if limit]
    if not given:
        return None if train.max_minutes else DEFAULT_STEPS
    if min(given) < 1:
        least = f"one step is {train.batch_tokens:,} tokens and {flops * train.batch_tokens:.3g} FLOPs"
        raise ConfigError(
            f"train.max_tokens or train.max_flops ends the run before its first step: {least}", "raise it"
        )
    return int(min(given))


def check_stop(plan: Plan, stop_at: int | None, *, done: int) -> None:
    """Raises ConfigError when `--stop-at` is not a step still to come."""
    if stop_at is not None and plan.steps is not None and not done < stop_at <= plan.steps:
        raise ConfigError(
            f"`--stop-at` is {stop_at}, and this run is at step {done} of {plan.steps}",
            f"choose a step from {done + 1} to {plan.steps}",
        )


@dataclass(frozen=True)
class Pace:
    """Measured before step 0: seconds of a step, of a validation token, of a sampled sentence."""

    step_s: float
    eval_token_s: float
    sample_s: float

    def as_dict(self) -> dict[str, float]:
        return dict(vars(self))


def measure(plan: Plan, trainer: Trainer) -> Pace:
    """Time a few gradients, one evaluation batch and a few sampled tokens; the run is as if they had not been."""
    from lmlab.generate.sample import SAMPLE_TOKENS, sample

    prepared, seq_len = plan.prepared, plan.exp.model.seq_len
    step_s = STEP_OVER_GRADIENT / measured_rate(trainer.stepper, trainer.batches)
    started = time.perf_counter()
    tokens = trainer.loss_on(prepared.val, plan.memory.micro_rows * seq_len).tokens
    eval_token_s, started = (time.perf_counter() - started) / tokens, time.perf_counter()
    sample(trainer.twin.model, prepared.tokenizer, seq_len=seq_len, n_tokens=4)
    return Pace(step_s, eval_token_s, (time.perf_counter() - started) * SAMPLE_TOKENS / 4)


def run_s(plan: Plan, pace: Pace, steps: int, done: int = 0) -> float:
    """Estimated seconds of a run of `steps` from step `done` to its end, evaluations included."""
    every, val, test = plan.evaluate_every(steps), plan.prepared.val.n_targets, plan.prepared.test.n_targets
    looks = steps // every - done // every
    part = min(plan.exp.train.eval_tokens or val, val)
    tokens = looks * part + 2 * val + test  # at the end: all of val, of the best checkpoint too, and test
    return (steps - done) * pace.step_s + tokens * pace.eval_token_s + looks * pace.sample_s


def bounded_by_minutes(plan: Plan, pace: Pace) -> int:
    """The most steps that end within train.max_minutes, evaluations included, and within the other limits."""
    minutes, most = plan.exp.train.max_minutes, plan.steps
    if minutes is None:
        assert most is not None
        return most
    fits, too_many = 0, (most or int(minutes * 60 / pace.step_s)) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if run_s(plan, pace, middle) <= minutes * 60 else (fits, middle)
    if fits < 1:
        raise ConfigError(
            f"`train.max_minutes` is {minutes:g}, and one step with its evaluations takes about "
            f"{run_s(plan, pace, 1) / 60:.2g} minutes",
            "allow more minutes, lower train.eval_tokens, or set train.max_steps",
        )
    return fits
