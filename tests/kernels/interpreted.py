"""Code that runs Triton's kernels on the CPU, by Triton's interpreter. It is switched on when triton is imported, so
the code runs in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(code: str) -> str:
    """What the code prints; an error of it is raised with its stderr. Skips where triton is missing."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install triton (Linux)")
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    if done.returncode:
        raise AssertionError(f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return done.stdout
