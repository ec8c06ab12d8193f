"""What the machine can do: the two rates that every other figure is a share of."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lmlab.runs.machine import cpu_model
from lmlab.train.device import matmul_rate, matmul_size

COPIED_BYTES = {"cpu": 2**28, "cuda": 2**30}
REPEATS = 6


@dataclass(frozen=True)
class Limits:
    """flops: of a large square matrix product in `dtype`, a second. copy_bytes: read plus written by a copy that fits
    no cache, a second."""

    machine: str
    threads: int
    dtype: str
    flops: float
    copy_bytes: float

    def said(self) -> str:
        return (
            f"{self.machine}, {self.threads} threads: matmul {self.flops / 1e12:.3g} TFLOP/s in {self.dtype}, "
            f"copy {self.copy_bytes / 1e9:.3g} GB/s"
        )


def measure(device: torch.device, dtype: torch.dtype) -> Limits:
    """Both rates, here and now; about a second."""
    name = cpu_model() if device.type == "cpu" else torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    flops = matmul_rate(device, dtype, threads)
    return Limits(name, threads, str(dtype).removeprefix("torch."), flops, copy_rate(device))


def copy_rate(device: torch.device) -> float:
    """Bytes read plus bytes written a second by a copy, best of some."""
    copy, best = copying(device), float("inf")
    for _ in range(REPEATS):
        synchronize(device)
        begun = time.perf_counter()
        copy.call()
        synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return copy.work / best


@dataclass(frozen=True)
class Yardstick:
    """What takes its turn among contenders, so that their rates are shares of its own there and then. work: bytes or
    FLOPs of a call."""

    call: Callable[[], object]
    work: float


def copying(device: torch.device) -> Yardstick:
    """A copy that fits no cache; work: bytes read plus bytes written."""
    source = torch.ones(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Yardstick(lambda: target.copy_(source), 2 * source.numel())


def multiplying(device: torch.device, dtype: torch.dtype) -> Yardstick:
    """A large square matrix product; work: its FLOPs."""
    n = matmul_size(device, dtype)
    a, out = (torch.full((n, n), 0.5, device=device, dtype=dtype) for _ in range(2))
    return Yardstick(lambda: torch.mm(a, a.T, out=out), 2 * n**3)


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator; nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
