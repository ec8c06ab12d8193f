"""Everything that is known before the first step: data, device, model, memory, steps, time. Writes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lmlab.config.tree import Experiment
from lmlab.cost.flops import flops_per_token, palm_flops_per_token
from lmlab.data.prepare import Prepared
from lmlab.errors import ConfigError
from lmlab.kernels.resolve import Ops, resolve
from lmlab.model.transformer import Transformer
from lmlab.train import memory
from lmlab.train.device import compile_wanted, resolve_device, resolve_precision
from lmlab.train.schedule import warmup_steps
from lmlab.train.spec import DEFAULT_STEPS, Train

STEP_OVER_GRADIENT = 1.08  # a whole step over its gradients: optimizer, twin, bookkeeping
EVAL_OVER_TRAIN = 0.35  # a token evaluated over a token trained


@dataclass
class Plan:
    exp: Experiment
    prepared: Prepared
    device: torch.device
    dtype: torch.dtype
    ops: Ops
    compiled: bool
    skeleton: Transformer  # on the meta device: counts only
    flops_per_token: float
    palm_flops_per_token: float
    memory: memory.MemoryPlan
    steps: int | None  # None: max_minutes waits for a measured rate

    @property
    def rows(self) -> int:
        return self.exp.train.batch_tokens // self.exp.model.seq_len

    @property
    def n_parameters(self) -> int:
        return sum(p.numel() for p in self.skeleton.parameters())

    @property
    def epochs(self) -> float:
        """How often the run reads the train split; 0 until the steps are known."""
        return (self.steps or 0) * self.exp.train.batch_tokens / self.prepared.train.n_tokens

    def machine(self) -> str:
        """`cpu bfloat16 eager`."""
        how = "compiled" if self.compiled else "eager"
        return f"{self.device} {str(self.dtype).removeprefix('torch.')} {how}"

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
            "warmup_steps": warmup_steps(self.exp.schedule, self.steps or 1),
            "compile": self.compiled,
            "kernels": self.kernels(),
        }


def make(exp: Experiment, prepared: Prepared, known: dict[str, Any] | None = None) -> Plan:
    """`known`: what an earlier start of the same run recorded (steps, micro_batch), used as it is."""
    device = resolve_device(exp.device)
    dtype = resolve_precision(exp.train.precision, device)
    ops = resolve(exp.kernels, device, dtype)
    vocab_size = prepared.tokenizer.vocab_size
    with torch.device("meta"):
        skeleton = Transformer(exp.arch, vocab_size, ops)
    flops = flops_per_token(skeleton, exp.arch)
    palm = palm_flops_per_token(skeleton, exp.arch)
    rows = exp.train.batch_tokens // exp.model.seq_len
    asked = exp.train.micro_batch if known is None else known["micro_batch"]
    n_parameters = sum(p.numel() for p in skeleton.parameters())
    needs = memory.plan(
        exp.arch, vocab_size, ops, dtype, rows=rows, asked=asked, device=device, n_parameters=n_parameters
    )
    steps = known["steps"] if known is not None else counted_steps(exp.train, flops)
    compiled = compile_wanted(exp.compile, device)
    return Plan(exp, prepared, device, dtype, ops, compiled, skeleton, flops, palm, needs, steps)


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
    return max(1, int(min(given)))


def check_stop(plan: Plan, stop_at: int | None, *, done: int) -> None:
    """Raises ConfigError when `--stop-at` is not a step still to come."""
    if stop_at is not None and plan.steps is not None and not done < stop_at <= plan.steps:
        raise ConfigError(
            f"`--stop-at` is {stop_at}, and this run is at step {done} of {plan.steps}",
            f"choose a step from {done + 1} to {plan.steps}",
        )


def bounded_by_minutes(plan: Plan, rate: float) -> int:
    """Steps that end within train.max_minutes at `rate` steps/s, evaluations included."""
    minutes = plan.exp.train.max_minutes
    if minutes is None:
        assert plan.steps is not None
        return plan.steps
    left_s = minutes * 60 - evaluation_s(plan, rate)
    fit = int(left_s * rate / STEP_OVER_GRADIENT)
    if fit < 1:
        raise ConfigError(
            f"`train.max_minutes` is {minutes:g}, and evaluation alone takes about {evaluation_s(plan, rate) / 60:.1f}",
            "allow more minutes, lower train.eval_tokens, or set train.max_steps",
        )
    return fit if plan.steps is None else min(fit, plan.steps)


def evaluation_s(plan: Plan, rate: float) -> float:
    """Seconds for the evaluations of a whole run: four intervals, then all of val and test."""
    train, prepared = plan.exp.train, plan.prepared
    n_interval = min(train.eval_tokens or prepared.val.n_tokens, prepared.val.n_tokens)
    tokens = 3 * n_interval + prepared.val.n_tokens + prepared.test.n_tokens
    return EVAL_OVER_TRAIN * tokens / (rate * train.batch_tokens)


def run_s(plan: Plan, rate: float, steps_left: int) -> float:
    """Estimated seconds until the run has ended."""
    return steps_left * STEP_OVER_GRADIENT / rate + evaluation_s(plan, rate)
