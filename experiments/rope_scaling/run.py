"""One checkpoint, four times its length: which scaling of rotations serves it best, untuned and after a short tuning?

    python experiments/rope_scaling/run.py              # about 10 minutes on 2 CPU cores
    python experiments/rope_scaling/run.py --verdict    # of what is in ./runs already
    python experiments/rope_scaling/run.py model=small model.seq_len=512 train.max_tokens=1e9   # a GPU

Other words go to the training, in place of those below. What must hold is, in shape, what Chen et al. 2023
(2306.15595) and Peng et al. 2023 (2309.00071) report: without tuning none >> PI > NTK >= dynamic NTK, with it PI < NTK;
and dynamic NTK is no scaling up to the trained length.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from lmlab.errors import RunError
from lmlab.runs.evals import newest
from lmlab.runs.find import resolve

NAME, FACTOR = "rope_scaling", 4
TRAIN = ["model=nano", "train.max_tokens=2000000", "train.eval_every_steps=250", "train.eval_tokens=16384"]
TUNE = ["train.max_tokens=200000", "lr=3e-4", "train.eval_every_steps=50", "train.eval_tokens=16384"]
TUNED = ("none", "pi", "ntk", "yarn")
FAR_ABOVE = 0.2  # nats/token: what `>>` means here


def lmlab(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "lmlab", *words], check=True)


def keys(usual: list[str], typed: list[str]) -> list[str]:
    """What is typed replaces what is usual."""
    taken = {word.partition("=")[0] for word in typed}
    return [word for word in usual if word.partition("=")[0] not in taken] + typed


def cells(name: str) -> tuple[int, dict[tuple[str, int], dict[str, Any]]]:
    """(trained length, {(scaling, length): figures}) of the run's newest long-context evaluation."""
    report = newest(resolve(name, Path("runs")).run, "long-context")
    assert report is not None, f"{name} has no long-context evaluation"
    long = report["long_context"]
    return long["trained_length"], {(cell["scaling"], cell["length"]): cell for cell in long["cells"]}


def train(typed: list[str]) -> None:
    lmlab("train", f"name={NAME}", *keys(TRAIN, typed))
    seq_len = resolve(NAME, Path("runs")).run.config()["model"]["seq_len"]
    lengths = [seq_len // 2, seq_len, 2 * seq_len, FACTOR * seq_len]
    lmlab("eval", NAME, "--long-context", f"--lengths={','.join(map(str, lengths))}", f"--factors={FACTOR}")
    for scaling in TUNED:
        own = [] if scaling == "none" else [f"rope_scaling={scaling}", f"rope_scaling.factor={FACTOR}"]
        lmlab("train", "--from", NAME, f"name={NAME}_{scaling}", f"model.seq_len={FACTOR * seq_len}", *own, *TUNE)
        word = "none" if scaling == "none" else "own"
        at = f"--lengths={seq_len},{FACTOR * seq_len}"
        lmlab("eval", f"{NAME}_{scaling}", "--long-context", at, "--rope-scaling", word)


def verdict() -> bool:
    L, untuned = cells(NAME)
    far = FACTOR * L
    loss = {name: untuned[name, far]["sliding_loss"] for name in ("none", "pi", "ntk", "dynamic_ntk", "yarn")}
    tuned = {}
    for name in TUNED:
        found = cells(f"{NAME}_{name}")[1]
        tuned[name] = found["none" if name == "none" else "own", far]["sliding_loss"]
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


def main(words: list[str]) -> int:
    try:
        if "--verdict" not in words:
            train(words)
        return 0 if verdict() else 1
    except RunError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
