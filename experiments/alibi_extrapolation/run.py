"""Which positions hold past the trained length? Trains the sweep, evaluates every arm, says what passes.

    python experiments/alibi_extrapolation/run.py              # about 20 minutes on 2 CPU cores
    python experiments/alibi_extrapolation/run.py --verdict    # of what is in ./runs already
    python experiments/alibi_extrapolation/run.py model=small model.seq_len=512 train.max_tokens=1e9   # a GPU

Other words go to the sweep, in place of those of sweep.yaml. What must hold is, in shape, Table 2 of Press et al. 2021
(2108.12409): perplexity in windows that do not overlap, over that at the trained length L.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from lmlab.report.sources import opened
from lmlab.runs.evals import newest
from lmlab.runs.rundir import RunDir

NAME = "alibi_extrapolation"
ARMS = ("rope", "alibi", "sinusoidal", "t5", "learned")
TIMES = (1, 2, 4, 8)


def lmlab(*words: str) -> str:
    return subprocess.run([sys.executable, "-m", "lmlab", *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def ratios(run: RunDir) -> dict[int, float | None]:
    """{times the trained length: perplexity over that at it}; None = not available."""
    report = newest(run, "long-context")
    if report is None:
        sys.exit(f"{run.path} has no long-context evaluation: leave --verdict out")
    long = report["long_context"]
    cells = {
        cell["length"] / long["trained_length"]: cell for cell in long["cells"] if cell["scaling"] in ("own", "none")
    }
    base = cells[1]["perplexity"]
    return {n: None if cells[n]["not_available"] else cells[n]["perplexity"] / base for n in TIMES}


def verdict(found: dict[str, list[dict[int, float | None]]]) -> bool:
    def mean(arm: str, times: int) -> float:
        return statistics.mean(one[times] or float("nan") for one in found[arm])

    print(f"{'pos':<12}" + "".join(f"{n}L".rjust(10) for n in TIMES))
    for arm in ARMS:
        shown = ["n/a" if found[arm][0][n] is None else f"{mean(arm, n):.3f}" for n in TIMES]
        print(f"{arm:<12}" + "".join(cell.rjust(10) for cell in shown))
    rows: list[tuple[str, bool]] = [
        ("sinusoidal at 2L > 1.3", mean("sinusoidal", 2) > 1.3),
        ("rope at 2L from 1.0 to sinusoidal's", 1.0 <= mean("rope", 2) <= mean("sinusoidal", 2)),
        ("alibi at 2L <= 1.0", mean("alibi", 2) <= 1.0),
        ("alibi at 8L <= 1.02", mean("alibi", 8) <= 1.02),
        ("learned past L: not available", all(one[n] is None for one in found["learned"] for n in TIMES[1:])),
    ]
    for what, holds in rows:
        print(f"{'PASS' if holds else 'FAIL'}  {what}")
    return all(holds for _, holds in rows)


def main(words: list[str]) -> int:
    only_verdict = "--verdict" in words
    sweep = ["sweep", f"experiment={NAME}", *(word for word in words if word != "--verdict")]
    folder = json.loads(lmlab(*sweep, "--dry-run", "--json"))["sweep"]
    if not only_verdict:
        lmlab(*sweep)
        print(lmlab("eval", folder, "--long-context", "--rope-scaling", "none"))
    found: dict[str, list[dict[int, float | None]]] = defaultdict(list)
    with opened([folder], Path("runs")) as selection:
        for run in selection.runs:
            found[run.config()["pos"]["name"]].append(ratios(run))
    print(f"perplexity over that at L, {len(found['rope'])} of each")
    return 0 if verdict(found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
