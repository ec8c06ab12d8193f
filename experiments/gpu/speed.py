"""Parity of every Triton kernel on a GPU, then its speed: what `make gpu` asks after run.py, within a budget.

    python experiments/gpu/speed.py [SECONDS]      # 330 by default; what no time is left for is named, and status 1

Each `lmlab bench` runs in a process of its own and leaves its JSON and figure beside this file. Without a GPU the CPU
rehearses: parity in Triton's interpreter, tiny shapes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

OUT = Path(__file__).parent
ROOT = OUT.parents[1]
PARITY = """
import sys
from tests.kernels import on_triton, test_triton_kernels as asked
device, wrong = sys.argv[1], 0
for case in asked.PARITY:
    try:
        getattr(on_triton, case)(device)
        print("parity", case, "holds", flush=True)
    except AssertionError as error:
        wrong += 1
        print("parity", case, "FAILS:", error, flush=True)
sys.exit(wrong)
"""
SMALL = ["model=small", "train.micro_batch=auto"]
ON_GPU = [
    ["train", *SMALL, "preset=gpt2", "train.batch_tokens=491520", "--rounds", "3"],
    ["train", *SMALL, "train.batch_tokens=491520", "--rounds", "3"],
    ["kernels", "--rounds", "3"],
    ["attn", "model.seq_len=4096", "--rounds", "3"],
    ["decode", "model=small", "--rounds", "3"],
    ["variants", *SMALL, "train.batch_tokens=32768", "--rounds", "3"],
    ["peers", *SMALL, "train.batch_tokens=32768", "--rounds", "3"],
]
NANO = ["model=nano", "model.n_layers=1", "model.d_model=32", "model.seq_len=64", "train.batch_tokens=128"]
REHEARSED = [["train", *NANO, "--rounds", "3"], ["decode", *NANO, "attn=mha", "--rounds", "3"]]


def ask(words: list[str], env: dict[str, str], deadline: float) -> bool:
    """Run it until the deadline; whether it ended well."""
    left = deadline - time.monotonic()
    if left < 5:
        print(f"not reached: {' '.join(words[:4])}", flush=True)
        return False
    try:
        return subprocess.run(words, cwd=ROOT, env=env, timeout=left, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"stopped at the end of the budget: {' '.join(words[:6])}", flush=True)
        return False


def main(budget_s: float) -> int:
    import torch

    cuda = torch.cuda.is_available()
    deadline = time.monotonic() + budget_s
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "WANDB_MODE": "disabled"}
    interpreter = {} if cuda else {"TRITON_INTERPRET": "1"}
    device = "cuda" if cuda else "cpu"
    failed = not ask([sys.executable, "-c", PARITY, device], env | interpreter, deadline)
    for n, words in enumerate(ON_GPU if cuda else REHEARSED):
        out = OUT / ("speed" if cuda else "rehearsal") / f"{n}-{words[0]}"
        line = [sys.executable, "-m", "lmlab", "bench", *words, "--out", str(out)]
        print(f"\n$ lmlab bench {' '.join(words)}", flush=True)
        failed |= not ask(line, env, deadline)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 330))
