"""One contender of a comparison: something that trains a step, whoever wrote it, on the same batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lmlab.bench.breakdown import breakdown
from lmlab.bench.limits import synchronize
from lmlab.bench.shapes import Shape
from lmlab.config.load import load
from lmlab.config.mixing import parts
from lmlab.config.tree import Experiment
from lmlab.data.prepare import cache_dir
from lmlab.data.source import Batches, Place, Source, open_source
from lmlab.kernels.resolve import Ops, resolve
from lmlab.model.transformer import Transformer
from lmlab.train.device import be_deterministic, compile_wanted, resolve_device, resolve_precision, resolve_residual
from lmlab.train.memory import plan
from lmlab.train.optim import state_bytes
from lmlab.train.setup import Trainer


@dataclass
class Contender:
    """step(k) trains on batch k and returns the loss, a 0-d tensor that nobody has waited for."""

    step: Callable[[int], torch.Tensor]
    device: torch.device
    n_parameters: int
    tokens: int  # of a step
    made: Trainer | None = None  # of lmlab's own

    def seconds(self, first: int, steps: int) -> tuple[float, float]:
        """Seconds of `steps` steps from batch `first`, and the last loss."""
        synchronize(self.device)
        begun = time.perf_counter()
        for k in range(first, first + steps):
            loss = self.step(k)
        synchronize(self.device)
        return time.perf_counter() - begun, float(loss)

    def breakdown(self, first: int, steps: int) -> dict[str, float]:
        """Seconds of a step by what they went into; of lmlab's own only."""
        assert self.made is not None
        return breakdown(self.made, self.step, range(first, first + steps))


def replaced(base: Sequence[str], words: Sequence[str]) -> list[str]:
    """The words of `base` whose keys are not set anew, then those that set them."""
    typed = {word.partition("=")[0] for word in words}
    return [word for word in base if word.partition("=")[0] not in typed] + list(words)


def device_of(words: Sequence[str]) -> torch.device:
    """What `device` says, before it is known which sizes suit it."""
    return resolve_device(load([word for word in words if word.startswith("device=")]).experiment.device)


@dataclass(frozen=True)
class Setting:
    """A composition and what it is trained on, here and now."""

    exp: Experiment
    prepared: Source
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, words: list[str]) -> Setting:
        exp = load(words).experiment
        device = resolve_device(exp.device)
        place = Place(cache_dir(exp.paths.cache), exp.model.seq_len, parts=parts(exp.data))
        prepared = open_source(exp.data, exp.tokenizer, place)
        return cls(exp, prepared, device, resolve_precision(exp.train.precision, device))

    @property
    def vocab_size(self) -> int:
        return self.prepared.tokenizer.vocab_size

    @property
    def shape(self) -> Shape:
        return Shape.of(self.exp, self.vocab_size)

    @property
    def rows(self) -> int:
        return self.exp.train.batch_tokens // self.exp.model.seq_len

    @property
    def ops(self) -> Ops:
        residual = resolve_residual(self.exp.train.residual_dtype, self.dtype)
        return resolve(self.exp.kernels, self.device, self.dtype, residual, compiled=self.compiled)

    def skeleton(self) -> Transformer:
        """The model without memory: for counts."""
        with torch.device("meta"):
            return Transformer(self.exp.arch, self.vocab_size, self.ops)

    @property
    def compiled(self) -> bool:
        return compile_wanted(self.exp.compile, self.device)


def trainer(setting: Setting) -> Trainer:
    """What `lmlab train` would step with; the process is made deterministic, as training makes it."""
    exp, device = setting.exp, setting.device
    be_deterministic(device)
    skeleton = setting.skeleton()
    needs = plan(
        exp.arch,
        setting.vocab_size,
        setting.ops,
        setting.dtype,
        rows=setting.rows,
        asked=exp.train.micro_batch,
        device=device,
        n_parameters=sum(p.numel() for p in skeleton.parameters()),
        optimizer_bytes=state_bytes(exp.optim, skeleton),
        packed=exp.data.packing == "documents",
        recompute=exp.train.activation_checkpointing == "blocks",
    )
    return Trainer.make(
        exp,
        setting.prepared,
        ops=setting.ops,
        device=device,
        dtype=setting.dtype,
        micro_rows=needs.micro_rows,
        compiled=setting.compiled,
    )


def ours(setting: Setting, made: Trainer) -> Contender:
    """lmlab's own step, as `lmlab train` takes it."""
    lr, stepper, batches = setting.exp.optim.lr, made.stepper, made.batches

    def step(k: int) -> torch.Tensor:
        return stepper(batches.batch(k), step=k, lr=lr)[0]

    n_parameters = sum(p.numel() for p in made.master.parameters())
    return Contender(step, setting.device, n_parameters, setting.exp.train.batch_tokens, made)


def theirs(setting: Setting, net: nn.Module) -> Contender:
    """A peer's model under autocast, in a plain loop: fused AdamW, matrices decayed, clipped."""
    exp, device = setting.exp, setting.device
    net = net.to(device)
    decayed = [p for p in net.parameters() if p.ndim >= 2]
    others = [p for p in net.parameters() if p.ndim < 2]
    optim: Any = exp.optim
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=(0.9, 0.95), fused=True)
    batches = _batches(setting)
    forward: Any = torch.compile(net) if setting.compiled else net
    half = setting.dtype != torch.float32

    def step(k: int) -> torch.Tensor:
        batch = batches.batch(k).to(device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, setting.dtype, enabled=half):
            loss: torch.Tensor = forward(batch.tokens_BT, batch.targets_BT)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return Contender(step, device, sum(p.numel() for p in net.parameters()), exp.train.batch_tokens)


def _batches(setting: Setting) -> Batches:
    exp = setting.exp
    how = {"rows": setting.rows, "seq_len": exp.model.seq_len, "seed": exp.seeds()["data"]}
    return setting.prepared.batches(**how, packing="stream")
