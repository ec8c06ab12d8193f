"""How much memory something takes at its peak: of the resident pages on a CPU, of what torch holds on a GPU."""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lmlab.bench.limits import synchronize

CLEAR_PEAK = "5"  # what /proc/self/clear_refs takes to begin the peak of resident memory anew


def begins() -> int:
    """Resident bytes now; the peak counts from here."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)
    return _status("VmRSS")


def peak(device: torch.device, before: int) -> int:
    """Bytes at the peak above `before`; on a GPU all that was held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM") - before


def extra(f: Callable[[], Any], device: torch.device) -> int:
    """Bytes that one call takes at its peak beside what is held already, its results included. On a CPU the allocator
    first returns what it keeps, else the call would live in that."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        result = f()
        synchronize(device)
        return peak(device, 0) - held
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = begins()
    result = f()  # noqa: F841  # alive until the peak is read
    return peak(device, before)


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024
