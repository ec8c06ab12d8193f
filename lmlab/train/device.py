"""Where and in which precision to compute; reproducibility and the allocator are set here, before the first tensor."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import time
from typing import Any

import torch

from lmlab.errors import ConfigError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MMAP_BYTES, TRIM_BYTES = 1 << 25, 1 << 30  # glibc takes no mmap threshold above 32 MiB


def resolve_device(word: str) -> torch.device:
    """auto → cuda when there is one. Raises ConfigError for a GPU that is not there."""
    if word == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(word)
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        count = torch.cuda.device_count()
        raise ConfigError(f"`device` is {word}, and {count} CUDA devices are there", "use device=auto or device=cpu")
    return device


def bf16_is_native(device: torch.device) -> bool:
    """Whether bf16 matmuls run in hardware: CUDA from Ampere on, CPUs with AMX or AVX-512 bf16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # true as well where AVX-512 only emulates it
        return False
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    x86 = [bool(getattr(torch.cpu, probe)()) for probe in probes if hasattr(torch.cpu, probe)]
    return any(x86) or platform.machine() in ("aarch64", "arm64")


def resolve_precision(word: str, device: torch.device) -> torch.dtype:
    """auto → bf16 where native, else fp32; fp16 wherever it is asked for (on CPUs it is slow, and right). Raises
    ConfigError when bf16 is asked for and would be emulated."""
    if word == "fp16":
        return torch.float16
    native = bf16_is_native(device)
    if word == "bf16" and not native:
        raise ConfigError(
            f"`train.precision` is bf16, which {device} only emulates", "use train.precision=fp32 or auto"
        )
    return torch.bfloat16 if word == "bf16" or (word == "auto" and native) else torch.float32


def resolve_residual(word: str, dtype: torch.dtype) -> torch.dtype | None:
    """What the residual is kept in where that is not `dtype`, which is computed in."""
    return torch.float32 if word == "fp32" and dtype.itemsize < 4 else None


def compile_wanted(word: bool | str, device: torch.device) -> bool:
    """auto → on for CUDA, off on CPU."""
    return device.type == "cuda" if word == "auto" else bool(word)


def be_deterministic(device: torch.device) -> None:
    """Same machine, threads and versions → the same bits. On CUDA operations without a repeatable form only warn."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=device.type == "cuda")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def tune_malloc() -> bool:
    """Keep freed buffers in the process: glibc returns large ones to the kernel, and each page is then faulted in anew.

    Returns whether it was done (glibc only). Measured: +4 % tokens/s for the default on 2 cores, up to 27 % elsewhere.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc: Any = ctypes.CDLL("libc.so.6")
    return bool(libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES) and libc.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES))


def torch_facts(device: torch.device) -> dict[str, Any]:
    """What the manifest records of torch and the device."""
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return facts


def matmul_size(device: torch.device, dtype: torch.dtype) -> int:
    """Rows and columns of the product that rates are measured by."""
    if device.type == "cuda":
        return 8192
    return 512 if dtype == torch.float16 else 1536  # in fp16 most CPUs are a hundred times slower


@functools.cache
def matmul_rate(device: torch.device, dtype: torch.dtype, threads: int, repeats: int = 6) -> float:
    """FLOP/s of a large square matrix product, as a linear layer computes it, best of `repeats`: what MFU is a fraction
    of. Measured once a process for so many CPU threads."""
    n = matmul_size(device, dtype)
    a = torch.full((n, n), 0.5, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        product = torch.nn.functional.linear(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    del product
    return 2 * n**3 / best
