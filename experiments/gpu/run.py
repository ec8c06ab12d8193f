"""What a GPU machine is asked: 100 steps of the default, eager and compiled, against the same steps on its CPU.

Needs no network and no wandb. Without a GPU it rehearses the same on the CPU alone.

    make gpu                    # or, on a machine whose own Python has torch: make gpu PYTHON=python3

Prints one line a variant and writes experiments/gpu/<device>.json: losses, tokens/s (median of the steps after the
warm-up), seconds until the first step is done (compilation), peak memory, and how far the losses are from the CPU's.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lmlab.cli import plan as planning
from lmlab.cli.training import build_trainer, schedule_of
from lmlab.config.load import load
from lmlab.data.prepare import cache_dir, prepare
from lmlab.train import device as machine
from lmlab.train.memory import free_bytes

STEPS, CPU_STEPS, WARM_UP = 100, 10, 5
# lr=3e-4 below: at the default's 3e-3 the first steps are chaotic, and rounding grows to whole tenths by step 10.
OUT = Path(__file__).parent


def measure(overrides: list[str], steps: int) -> dict[str, Any]:
    """Train `steps` steps of the composition in memory; nothing is written."""
    torch._dynamo.reset()
    exp = load([*overrides, f"train.max_steps={STEPS}", "train.precision=bf16", "lr=3e-4"]).experiment
    prepared = prepare(exp.data, exp.tokenizer, cache_dir(exp.paths.cache))
    plan = planning.make(exp, prepared)
    cuda = plan.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(plan.device)
    trainer, lr = build_trainer(plan), schedule_of(plan)
    losses, times = [], []
    for step in range(steps):
        started = time.perf_counter()
        loss, _ = trainer.stepper(trainer.batches.batch(step), step=step, lr=lr(step))
        losses.append(float(loss))  # waits for the device
        times.append(time.perf_counter() - started)
    median = sorted(times[min(WARM_UP, steps - 1) :])[(steps - min(WARM_UP, steps - 1)) // 2]
    return {
        "overrides": overrides,
        "device": str(plan.device),
        "compiled": plan.compiled,
        "kernels": plan.resolved()["kernels"],
        "first_step_s": times[0],
        "tokens_per_s": exp.train.batch_tokens / median,
        "peak_bytes": torch.cuda.max_memory_allocated(plan.device) if cuda else None,
        "losses": losses,
    }


def main() -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    reference = measure(["device=cpu"], CPU_STEPS)
    variants = [["compile=false"], ["compile=true"]]
    found = [measure([f"device={device}", *v], STEPS if cuda else CPU_STEPS) for v in variants]
    for one in found:
        apart = [abs(a - b) for a, b in zip(one["losses"], reference["losses"], strict=False)]
        one["max_loss_difference_from_cpu"] = max(apart)
        how = "compiled" if one["compiled"] else "eager"
        memory = f"{one['peak_bytes'] / 2**20:.0f} MiB" if one["peak_bytes"] else "-"
        print(
            f"{one['device']:8} {how:9} {one['tokens_per_s']:12,.0f} tok/s  first step {one['first_step_s']:.1f} s  "
            f"peak {memory}  loss {one['losses'][-1]:.4f}  |loss - cpu| ≤ {max(apart):.2e} over {len(apart)} steps"
        )
    name = torch.cuda.get_device_name(device) if cuda else "cpu"
    report = {
        "machine": machine.torch_facts(device),
        "matmul_flops_per_s": machine.matmul_rate(device, torch.bfloat16, n=8192 if cuda else 1536),
        "free_bytes": free_bytes(device),
        "python": sys.version.split()[0],
        "cpu_reference": reference,
        "variants": found,
    }
    path = OUT / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
