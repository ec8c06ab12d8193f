"""A model and its optimizer, ready to step: what training, resuming and verifying share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lmlab.config.tree import Experiment
from lmlab.data.batches import Batch
from lmlab.data.source import Batches, Source, Split
from lmlab.errors import RunError
from lmlab.eval.loss import LossSum, evaluate, total
from lmlab.eval.task_scores import score
from lmlab.kernels.resolve import Ops
from lmlab.model.cache import CacheKind
from lmlab.model.transformer import Transformer, build
from lmlab.registry import make
from lmlab.runs.checkpoint import Checkpoint
from lmlab.train.loop import State
from lmlab.train.loss_scale import LossScale
from lmlab.train.optim import load_state, state_by_name
from lmlab.train.routing import Routing
from lmlab.train.step import Stepper
from lmlab.train.twin import Twin


@dataclass
class Trainer:
    """master (fp32), its twin in the compute dtype, optimizer, batches and the two fixed evaluation sets."""

    exp: Experiment
    prepared: Source
    master: Transformer
    twin: Twin[Transformer]
    stepper: Stepper
    batches: Batches
    token_bytes: torch.Tensor

    @classmethod
    def make(
        cls,
        exp: Experiment,
        prepared: Source,
        *,
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
        micro_rows: int,
        compiled: bool,
        vocab_size: int | None = None,
    ) -> Trainer:
        """vocab_size: what is predicted; None = as many as the tokenizer has ids."""
        seeds, predicted = exp.seeds(), vocab_size or prepared.tokenizer.vocab_size
        master = build(exp.arch, predicted, ops, seed=seeds["init"], device=device)
        twin = Twin(master, dtype)
        twin.model.recompute = exp.train.activation_checkpointing == "blocks"
        if compiled:
            twin.model.compile_blocks()
        optimizer = make(exp.optim, master)
        scale = LossScale(device, exp.train.batch_tokens) if dtype == torch.float16 else None
        stepper = Stepper(twin, optimizer, micro_rows, exp.optim.clip, seeds["dropout"], device, scale)
        rows, T = exp.train.batch_tokens // exp.model.seq_len, exp.model.seq_len
        batches = prepared.batches(rows=rows, seq_len=T, seed=seeds["data"], packing=exp.data.packing)
        return cls(exp, prepared, master, twin, stepper, batches, torch.from_numpy(prepared.tokenizer.token_bytes))

    # ------------------------------------------------------------ state

    def state(self, state: State) -> dict[str, Any]:
        """What `state.pt` holds: counters, the optimizer's state by parameter name, and what the loss is scaled by."""
        scale = self.stepper.loss_scale
        own = {} if scale is None else {"loss_scale": scale.state()}
        return {"counters": dict(vars(state)), "optimizer": state_by_name(self.stepper.optimizer, self.master), **own}

    def begin(self, weights: dict[str, torch.Tensor]) -> State:
        """Start from these weights in place of the drawn ones, with an optimizer that has seen nothing."""
        self.master.load_state_dict(weights, strict=True)
        self.twin.refresh()
        return State()

    def load(self, checkpoint: Checkpoint) -> State:
        """Weights, optimizer and counters of a checkpoint. Raises RunError when a piece is missing or does not fit."""
        try:
            self.master.load_state_dict(checkpoint.model, strict=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise RunError(f"the checkpoint does not fit the model: {reason}", "start again with --force") from error
        load_state(self.stepper.optimizer, self.master, checkpoint.state["optimizer"])
        if self.stepper.loss_scale is not None:
            self.stepper.loss_scale.load(checkpoint.state["loss_scale"])
        self.twin.refresh()
        return State(**checkpoint.state["counters"])

    # ------------------------------------------------------------ evaluation

    def loss_on(self, tokens: Split, max_tokens: int | None = None, routing: Routing | None = None) -> LossSum:
        """The computed model's loss on a split, or on its first `max_tokens`. routing: takes up routers' stats."""
        return evaluate_file(
            self.twin.model,
            tokens,
            self.exp,
            start=self.prepared.tokenizer.start,
            token_bytes=self.token_bytes,
            rows=self.stepper.micro_rows,
            max_tokens=max_tokens,
            routing=routing,
        )

    def answers_on(self, split: str) -> dict[str, float]:
        """{"val/token_accuracy", "val/exact"} of the task that is trained on; in a mixture of each of its tasks, with
        its name: "val/passkey/exact"."""
        found: dict[str, float] = {}
        for name, source in self.prepared.tasks.items():
            prefix = f"{split}/{name}" if name else split
            figures = score(self.twin.model, getattr(source, split).examples).figures()
            found |= {f"{prefix}/{figure}": figures[figure] for figure in ("token_accuracy", "exact")}
        return found

    def first_of_val(self, n_tokens: int) -> Iterator[Batch]:
        """The first so many targets of val, in rows as they are evaluated."""
        cut = dict(rows=self.stepper.micro_rows, seq_len=self.exp.model.seq_len, packing=self.exp.data.packing)
        return self.prepared.val.batches(**cut, start=self.prepared.tokenizer.start, max_tokens=n_tokens)  # type: ignore[arg-type]


def evaluate_file(
    model: Transformer,
    tokens: Split,
    exp: Experiment,
    *,
    start: int,
    token_bytes: torch.Tensor,
    rows: int,
    max_tokens: int | None = None,
    kind: CacheKind | None = None,
    routing: Routing | None = None,
) -> LossSum:
    """Loss on a split in rows of model.seq_len, every target once; kind: by a cache (lmlab/eval/loss.py);
    routing: takes up what the routers did."""
    cut = dict(seq_len=exp.model.seq_len, packing=exp.data.packing, start=start, max_tokens=max_tokens)
    batches = tokens.batches(rows=rows, **cut)  # type: ignore[arg-type]
    routing = routing or Routing()
    return total(evaluate(model, batches, token_bytes, kind=kind, hear=routing.add))


def metrics_of(prefix: str, result: LossSum, *, lossless: bool) -> dict[str, float]:
    """{prefix/loss, prefix/bits_per_byte}: bits per byte only when the tokenizer gives back every byte."""
    row = {f"{prefix}/loss": result.nats_per_token}
    if lossless and math.isfinite(result.bits_per_byte):
        row[f"{prefix}/bits_per_byte"] = result.bits_per_byte
    return row
