"""One optimizer step: micro-batches, gradients in fp32, one clip, one update.

The loss is Σ weight · nats / Σ weight over the whole step, so any split into micro-batches gives the same gradient.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Protocol

import torch

from lmlab.data.batches import Batch
from lmlab.model.transformer import Transformer
from lmlab.train.optim import set_lr
from lmlab.train.routing import Routing
from lmlab.train.twin import Twin


def dropout_seed(seed: int, step: int, micro: int, rank: int = 0) -> int:
    """What the default generator is reseeded with before each micro-batch: nothing to save, nothing to disturb."""
    digest = hashlib.blake2b(f"dropout {seed} {step} {micro} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Probe(Protocol):
    """Looks at a step from both sides."""

    def before_update(self) -> None: ...
    def after_update(self, batch: Batch) -> dict[str, float]: ...


@dataclass
class Stepper:
    twin: Twin[Transformer]
    optimizer: torch.optim.Optimizer
    micro_rows: int
    clip: float | None
    seed: int
    device: torch.device
    routing: Routing = field(default_factory=Routing)  # of the last step
    z_loss: torch.Tensor | None = None  # what the z-loss added to the last step's loss, per token

    def __call__(
        self, batch: Batch, *, step: int, lr: float, probe: Probe | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Train on the batch. Returns (mean loss in nats/token, gradient norm before clipping), 0-d tensors."""
        set_lr(self.optimizer, lr)
        self.twin.zero_grads()
        loss = self.gradients(batch, step=step)
        if probe is not None:
            probe.before_update()
        norm = torch.nn.utils.get_total_norm(self.twin.grads())
        if self.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.twin.masters, self.clip, norm)
        self.optimizer.step()
        self.twin.master.after_step(self.routing.loads())
        self.twin.refresh()
        return loss, norm

    def gradients(self, batch: Batch, *, step: int) -> torch.Tensor:
        """Add the batch's gradients into the masters'; returns the mean loss.

        Backward runs on the plain sum, and the sum is divided in fp32: 1/weight is no bf16 number.
        """
        self.twin.model.train()
        self.routing = Routing()
        weight = float(batch.weights_BT.sum().clamp_min(1))
        nats: list[torch.Tensor] = []
        added: list[torch.Tensor] = []
        whole = batch.to(self.device)
        for micro, first in enumerate(range(0, len(whole.tokens_BT), self.micro_rows)):
            part = whole.rows(first, first + self.micro_rows)
            torch.manual_seed(dropout_seed(self.seed, step, micro))
            out = self.twin.model(
                part.tokens_BT,
                part.positions_BT,
                documents_BT=part.documents_BT,
                targets_BT=part.targets_BT,
                weights_BT=part.weights_BT,
            )
            assert out.loss is not None
            out.objective.backward()
            self.routing.add(out.stats)
            self.twin.collect()
            nats.append(out.loss.detach())
            if out.z_loss is not None:
                added.append(out.z_loss)
        torch._foreach_div_(self.twin.grads(), weight)
        self.z_loss = torch.stack(added).sum() / weight if added else None
        return torch.stack(nats).sum() / weight

    def figures(self) -> dict[str, float]:
        """Of the last step: what the z-loss added, and what routers did."""
        own = {} if self.z_loss is None else {"train/z_loss": float(self.z_loss)}
        return own | self.routing.figures()

    def finite(self) -> bool:
        """Whether every weight is a number: what a checkpoint may hold."""
        return bool(torch.isfinite(torch.nn.utils.get_total_norm(self.twin.masters)))
