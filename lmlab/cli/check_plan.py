"""What becomes of the fields of training: the plan of a run, and a few real steps of a small model."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch

from lmlab.check.composed import VOCAB, T, rows
from lmlab.check.flags import digest
from lmlab.check.small import given, small
from lmlab.cli import plan as planning
from lmlab.cli.run_one import Share
from lmlab.compat import rules
from lmlab.config.tree import Experiment
from lmlab.data.batches import Batch
from lmlab.kernels.resolve import on_cpu, resolve
from lmlab.model.transformer import build
from lmlab.registry import make
from lmlab.train.spec import DEFAULT_STEPS
from lmlab.train.step import Stepper
from lmlab.train.twin import Twin

STEPS, ROWS = 3, 4
ENOUGH = Share(host_bytes=2**60)  # only planned, so that no model is too large


def planned(experiment: Experiment, group: str) -> Any:
    """For sizes and lengths the plan, which `lmlab train --dry-run` prints; for all others what three steps come to."""
    if group in ("train", "model"):
        prepared: Any = SimpleNamespace(
            tokenizer=SimpleNamespace(vocab_size=VOCAB), epochs=lambda n_tokens: n_tokens / 10**6
        )
        shallow = given(experiment.model, n_layers=min(2, experiment.model.n_layers))
        kernels = on_cpu(experiment.kernels)
        here = dataclasses.replace(experiment, model=shallow, kernels=kernels, device="cpu")
        plan = planning.make(here, prepared, share=ENOUGH)
        return plan.resolved(), plan.memory.n_micro, experiment.train.max_minutes if plan.steps is None else None
    return trained(experiment)


def trained(experiment: Experiment) -> Any:
    """The learning rates of the whole run, the seeds, and every parameter after three steps."""
    arch, cpu = small(experiment.arch), torch.device("cpu")
    seeds, optim = experiment.seeds(), experiment.optim
    ops = resolve(on_cpu(experiment.kernels), cpu, torch.float32)
    master = build(arch, VOCAB, ops, seed=seeds["init"], device=cpu)
    total = rules.steps(experiment) or DEFAULT_STEPS
    schedule = make(experiment.schedule, optim.lr, total)
    lrs = [schedule(step) for step in range(total)]
    stepper = Stepper(Twin(master, torch.float32), make(optim, master), ROWS, optim.clip, seeds["dropout"], cpu)
    for step in range(STEPS):
        stepper(_batch(min(T, arch.model.seq_len), step), step=step, lr=max(lrs))
    return lrs, seeds, [digest(p) for p in master.parameters()]


def _batch(length: int, step: int) -> Batch:
    asked = rows(ROWS, length, seed=step)
    weights = torch.ones(asked.tokens_BT.shape)
    return Batch(asked.tokens_BT, asked.tokens_BT.roll(-1, 1), asked.positions_BT, None, weights)
