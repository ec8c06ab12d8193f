"""The machine as the operating system tells it: CPU, cores, free memory. Torch-free."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cpu_count() -> int:
    """CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_host_bytes() -> int:
    """Free memory, bounded by the control group's limit."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = next(int(line.split()[1]) for line in meminfo.read_text().splitlines() if "MemAvailable" in line) << 10
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return max(available, 0)


def gib(n_bytes: float) -> str:
    """1.5 GiB, 340 MiB, 4.1 MiB, 12 KiB."""
    if n_bytes < 2**20:
        return f"{n_bytes / 2**10:.0f} KiB"
    if n_bytes >= 2**30:
        return f"{n_bytes / 2**30:.1f} GiB"
    return f"{n_bytes / 2**20:.{0 if n_bytes >= 10 * 2**20 else 1}f} MiB"
