"""fp16: gradients are computed of a multiple of the loss, so that small ones are no zeros (Micikevicius et al. 2017,
1710.03740)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

FIRST = 2.0**16  # on the mean loss of a step
FLOOR = 1.0  # below it the gradients overflow by themselves


class LossScale:
    """A power of two, halved when a gradient overflows, and the step is then skipped; doubled after 2000 steps without.

    It acts on the weights of the tokens, and so on every gradient but the probabilities that the loss rounds before it
    weights them: below 6e-8 they are 0. What multiplies Σ weight · nats is the scale over 2^⌊log₂ tokens of a step⌋,
    since the scale is that of the mean.
    """

    def __init__(self, device: torch.device, batch_tokens: int) -> None:
        self.tokens = 2.0 ** math.floor(math.log2(batch_tokens))
        self.scaler = torch.amp.GradScaler(device.type, init_scale=FIRST / self.tokens)
        self.one = torch.ones((), device=device)
        self.skipped = torch.zeros((), device=device)  # steps so far
        self.scaler.scale(self.one)  # the scale is made by its first use

    def scaled(self, weights_BT: Tensor) -> Tensor:
        """The weights of a micro-batch's tokens, times what their sum is scaled by."""
        return self.scaler.scale(weights_BT)

    def unscaled(self, loss: Tensor) -> Tensor:
        """A loss of scaled weights, as it is."""
        return loss / self.scaler.scale(self.one)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients, and note whether one of them is not finite."""
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Step, unless a gradient is not finite, and choose the next scale. Returns 1 for a step, 0 for a skipped one.

        The host never learns which, where the optimizer can be told by a tensor (torch's fused AdamW); of any other it
        waits for the answer, once a step. So it does for the rows of experts in fp16, until torch's grouped_mm has it.
        """
        before = self.scaler.scale(self.one)
        self.scaler.step(optimizer)
        self.scaler.update()
        skipped = self.scaler.scale(self.one) < before
        self.skipped += skipped
        return 1 - skipped.long()

    @staticmethod
    def counted(loads: Sequence[Optional[Tensor]], stepped: Tensor) -> list[Optional[Tensor]]:
        """Experts' loads, even (0) when the step was skipped, so that no bias moves."""
        return [None if load is None else load * stepped for load in loads]

    def scale(self) -> float:
        """On the mean loss."""
        return self.scaler.get_scale() * self.tokens

    def figures(self) -> dict[str, float]:
        return {"train/loss_scale": self.scale(), "train/skipped_steps": int(self.skipped)}

    def exhausted(self) -> bool:
        """Whether it was halved until nothing is left: gradients are not finite whatever the scale."""
        return self.scale() < FLOOR

    def state(self) -> dict[str, Any]:
        return {"scaler": self.scaler.state_dict(), "skipped": int(self.skipped)}

    def load(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state["scaler"])
        self.skipped.fill_(state["skipped"])
