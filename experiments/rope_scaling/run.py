"""One checkpoint at four times its length: which scaling serves it best, untuned and after a short tuning?

    python experiments/rope_scaling/run.py      # about 10 minutes on 2 CPU cores; what is there is kept
    python experiments/rope_scaling/run.py model=small model.seq_len=512 train.max_tokens=1e9   # a GPU

Other words go to the training, in place of those below. What must hold is, in shape, what Chen et al. 2023
(2306.15595) and Peng et al. 2023 (2309.00071) report: without tuning none >> PI > NTK >= dynamic NTK, with it PI < NTK;
and dynamic NTK is no scaling up to the trained length.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from lmlab.runs.evals import newest
from lmlab.runs.rundir import RunDir

FACTOR = 4
TRAIN = ["model=nano", "train.max_tokens=2000000", "train.eval_every_steps=250", "train.eval_tokens=16384"]
TUNE = ["train.max_tokens=200000", "lr=3e-4", "train.eval_every_steps=50", "train.eval_tokens=16384"]
TUNED = ("none", "pi", "ntk", "yarn")
FAR_ABOVE = 0.2  # nats/token: what `>>` means here

Cells = dict[tuple[str, int], dict[str, Any]]


def lmlab(*words: str) -> str:
    return subprocess.run([sys.executable, "-m", "lmlab", *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def keys(usual: list[str], typed: list[str]) -> list[str]:
    """What is typed replaces what is usual."""
    taken = {word.partition("=")[0] for word in typed}
    return [word for word in usual if word.partition("=")[0] not in taken] + typed


def trained(*words: str) -> Path:
    """The run of these words; one that is there is not trained again."""
    return Path(json.loads(lmlab("train", *words, "--json"))["run"])


def evaluated(run: Path, lengths: list[int], scaling: str | None = None) -> Cells:
    """{(scaling, length): figures} of the run's last checkpoint, by one scaling (as it is) or by all at FACTOR; an
    evaluation that is there is not made again."""
    own = RunDir(run)
    asked = {"lengths": lengths, "factors": None if scaling else [FACTOR]}
    report = newest(own, "long-context", own.manifest()["result"]["content_hash"])
    if report is None or any(report["long_context"][key] != value for key, value in asked.items()):
        by = [f"--factors={FACTOR}"] if scaling is None else ["--rope-scaling", scaling]
        lmlab("eval", str(run), "--long-context", f"--lengths={','.join(map(str, lengths))}", *by)
        report = newest(own, "long-context")
    assert report is not None
    return {(cell["scaling"], cell["length"]): cell for cell in report["long_context"]["cells"]}


def measured(typed: list[str]) -> tuple[int, Cells, dict[str, float]]:
    """(trained length, untuned figures, {scaling: nats/token after tuning})."""
    run = trained(*keys(TRAIN, typed))
    L = RunDir(run).config()["model"]["seq_len"]
    far = FACTOR * L
    untuned = evaluated(run, [L // 2, L, 2 * L, far])
    tuned = {}
    for name in TUNED:
        own = [] if name == "none" else [f"rope_scaling={name}", f"rope_scaling.factor={FACTOR}"]
        longer = trained("--from", str(run), f"model.seq_len={far}", *own, *TUNE)
        word = "none" if name == "none" else "own"
        tuned[name] = evaluated(longer, [L, far], word)[word, far]["sliding_loss"]
    return L, untuned, tuned


def verdict(L: int, untuned: Cells, tuned: dict[str, float]) -> bool:
    far = FACTOR * L
    loss = {name: untuned[name, far]["sliding_loss"] for name in ("none", "pi", "ntk", "dynamic_ntk", "yarn")}
    print(
        f"nats/token in sliding windows of {far} tokens; at {L}, as trained, {untuned['none', L]['sliding_loss']:.3f}"
    )
    for name, value in loss.items():
        print(f"{name:<12} untuned {value:.3f}" + (f"   tuned {tuned[name]:.3f}" if name in tuned else ""))
    same = ("loss", "sliding_loss", "buckets", "copy", "needle")
    up_to = [n for (name, n) in untuned if name == "none" and n <= L]
    rows = [
        (f"untuned: none >> pi (by {FAR_ABOVE} nats)", loss["none"] - loss["pi"] > FAR_ABOVE),
        ("untuned: pi > ntk", loss["pi"] > loss["ntk"]),
        ("untuned: ntk >= dynamic_ntk", loss["ntk"] >= loss["dynamic_ntk"]),
        ("tuned: pi < ntk", tuned["pi"] < tuned["ntk"]),
        ("dynamic_ntk = none up to L, to the last bit", _equal(untuned, up_to, same)),
    ]
    for what, holds in rows:
        print(f"{'PASS' if holds else 'FAIL'}  {what}")
    return all(holds for _, holds in rows)


def _equal(found: dict[tuple[str, int], dict[str, Any]], lengths: list[int], keys: tuple[str, ...]) -> bool:
    return all(found["dynamic_ntk", n][key] == found["none", n][key] for n in lengths for key in keys)


if __name__ == "__main__":
    sys.exit(0 if verdict(*measured(sys.argv[1:])) else 1)
