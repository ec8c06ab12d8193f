"""Can two layers of attention recall what one can't? Multi-query associative recall (Arora et al. 2023, 2312.04927).

    python experiments/mqar/run.py              # 64 tokens, 4 pairs: under 3 minutes on 2 CPU cores
    python experiments/mqar/run.py --verdict    # of what is in ./runs already
    python experiments/mqar/run.py data.n_pairs=16 data.vocab_size=8192 model.seq_len=256 train.max_tokens=1e9   # a GPU

Other words go to the sweep, in place of those of sweep.yaml.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from lmlab.report.sources import opened

ENOUGH = 0.95  # of the answers


def lmlab(*words: str) -> str:
    return subprocess.run([sys.executable, "-m", "lmlab", *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def main(words: list[str]) -> int:
    sweep = ["sweep", "experiment=mqar", *(word for word in words if word != "--verdict")]
    folder = json.loads(lmlab(*sweep, "--dry-run", "--json"))["sweep"]
    if "--verdict" not in words:
        lmlab(*sweep)
    right: dict[int, list[float]] = defaultdict(list)
    with opened([folder], Path("runs")) as selection:
        for run in selection.runs:
            right[run.config()["model"]["n_layers"]].append(run.manifest()["result"]["val/token_accuracy"])
    two, one = (statistics.mean(right[n]) for n in (2, 1))
    rows = [
        (f"two layers give more than {ENOUGH:.0%} of the answers: {two:.1%}", two > ENOUGH),
        (f"one layer does not: {one:.1%}", one <= ENOUGH),
    ]
    for what, holds in rows:
        print(f"{'PASS' if holds else 'FAIL'}  {what}")
    return 0 if all(holds for _, holds in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
