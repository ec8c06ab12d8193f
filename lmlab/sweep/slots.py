"""Slots: the places where members of a sweep run side by side on this machine, one process each.

On CPU a slot is a share of the cores and of the memory; on GPUs it is one device, or a share of one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from lmlab.errors import ConfigError
from lmlab.runs.machine import cpu_count

GPU = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Slot:
    """`gpu`: the device this slot sees as its only one (None = whatever there is); `threads`: of torch (None = torch's
    own choice); `share`: how many slots use the same device's memory."""

    number: int
    gpu: str | None = None
    threads: int | None = None
    share: int = 1

    def enter(self) -> None:
        """Make the process that is to train see its device and its share of the cores. Before torch meets CUDA."""
        if self.gpu is not None:
            os.environ[GPU] = self.gpu
        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads)


def sees_gpu() -> bool:
    """Whether the process of a slot sees a device that torch can use."""
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.device_count() == 1)


def make(workers: int | None, gpus: str | None, runs_per_gpu: int | None) -> list[Slot]:
    """The slots that the flags ask for; one without flags. Raises ConfigError."""
    if gpus is None:
        if runs_per_gpu is not None:
            raise ConfigError(
                f"--runs-per-gpu {runs_per_gpu} is given without --gpus", "name the devices: --gpus 0,1,2,3"
            )
        n = workers or 1
        threads = max(1, cpu_count() // n) if n > 1 else None
        return [Slot(i, threads=threads, share=n) for i in range(n)]
    names = [name.strip() for name in gpus.split(",") if name.strip()]
    if workers is not None:
        raise ConfigError(f"--workers {workers} and --gpus {gpus} both set the slots", "give --gpus and --runs-per-gpu")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--gpus {gpus} is not a list of devices", "write for example --gpus 0,1,2,3")
    each = runs_per_gpu or 1
    threads = max(1, cpu_count() // (len(names) * each))
    return [Slot(i, names[i % len(names)], threads, each) for i in range(len(names) * each)]
