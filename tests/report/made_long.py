"""Evaluations of long contexts made by hand, with figures that a test can tell beforehand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lmlab.runs.rundir import RunDir
from tests.report import made

LENGTHS = (128, 256, 512, 1024)
TRAINED = 256
DEPTHS = (0.0, 0.5, 1.0)
LOSS = {128: 3.5, 256: 3.4, 512: 3.6, 1024: 4.4}  # of rope; each seed 0.1 more than the one before


def cell(scaling: str, length: int, loss: float, *, factor: float | None = None, right: int = 8) -> dict[str, Any]:
    """Loss apart `loss`, sliding 0.1 less, SE 0.02; of 10 needles `right`, of 100 copied tokens 10·right."""
    edges = [0, *(2**k for k in range(4, 20) if 2**k < length), length]
    buckets = [{"from": a, "to": b, "nats": (loss + 1 / b) * (b - a), "tokens": b - a} for a, b in pairwise(edges)]
    return {
        "scaling": scaling,
        "factor": factor,
        "length": length,
        "not_available": None,
        "loss": loss,
        "loss_se": 0.02,
        "sliding_loss": loss - 0.1,
        "sliding_loss_se": 0.02,
        "stride": length // 2,
        "bits_per_byte": 1.0,
        "perplexity": math.exp(loss),
        "sliding_perplexity": math.exp(loss - 0.1),
        "buckets": buckets,
        "context_gain": 0.05,
        "context_gain_se": 0.01,
        "key_tokens": 40,
        "key_loss": 5.0,
        "key_loss_se": 0.3,
        "copy": {"n": 8, "gain": 1.5, "gain_se": 0.1, "accuracy": right / 10, "correct": 10 * right, "tokens": 100},
        "needle": [{"depth": d, "n": 10, "correct": right, "gain": 0.6, "gain_se": 0.3} for d in DEPTHS],
    }


def away(scaling: str, length: int, why: str) -> dict[str, Any]:
    return {"scaling": scaling, "factor": None, "length": length, "not_available": why}


def passkey(scaling: str, length: int, correct: int, n: int = 20) -> dict[str, Any]:
    half = {"n": n // 2}
    depths = [
        {"depth": 0.1, "correct": correct // 2, **half},
        {"depth": 0.9, "correct": correct - correct // 2, **half},
    ]
    own = {"exact": correct / n, "exact_low": 0.0, "exact_high": 1.0, "token_n": 5 * n, "token_correct": 5 * correct}
    task = {"task": "passkey", "scaling": scaling, "factor": None, "length": length, "not_available": None}
    return (
        task | own | {"n": n, "correct": correct, "token_accuracy": correct / n, "chance_exact": 1e-5, "depths": depths}
    )


def summary(what: str, scaling: str, effective: int | None, score: float = 0.8) -> dict[str, Any]:
    own = {"largest_80": effective, "k_max": 1024, "area": 0.7, "trained_score": score}
    return {"what": what, "scaling": scaling, "effective_length": effective, **own}


def evaluated(
    run: RunDir,
    cells: Sequence[dict[str, Any]],
    *,
    tasks: Sequence[dict[str, Any]] = (),
    rows: Sequence[dict[str, Any]] = (),
    when: str = "2026-01-02T000000.000000",
    n_documents: int = 8,
    tokens: int = 32768,
    content_hash: str = "c0ffee",
    left_out: Sequence[dict[str, Any]] = (),
    **fields: Any,
) -> Path:
    """Write the evaluation of a run as `lmlab eval --long-context` does."""
    inner = {
        "trained_length": TRAINED,
        "trained_scaling": "none",
        "lengths": list(LENGTHS),
        "left_out": list(left_out),
        "unit": "documents",
        "n_documents": n_documents,
        "tokens": tokens,
        "cells": list(cells),
        "tasks": list(tasks),
        "summary": list(rows),
    }
    body = {"run": run.name, "step": 100, "content_hash": content_hash, "data": "sotu", "split": "val"}
    body |= {"fingerprint": "f1f1f1f1aaaa", "long_context": inner, **fields}
    path = run.path / "eval" / f"{when}-long-context.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(body), encoding="utf-8")
    return path


def rope(root: Path, seed: int, name: str = "", **fields: Any) -> Any:
    """A run evaluated under two scalings: without one the loss is LOSS, with pi 0.5 less past the trained length."""
    run = made.run(root, name or f"rope-0000000{seed}", seed=seed, result={"content_hash": "c0ffee"})
    cells = [cell("none", n, LOSS[n] + seed / 10, right=8 if n <= 256 else 1 + seed) for n in LENGTHS]
    better = {n: LOSS[n] - 0.5 * (n > 256) for n in LENGTHS}
    cells += [cell("pi", n, better[n] + seed / 10, factor=max(1, n / 256)) for n in LENGTHS]
    rows = [summary("needle", "none", 256), summary("needle", "pi", 512 * (1 + seed))]
    tasks = [passkey("none", n, 18 if n <= 256 else 2) for n in LENGTHS]
    evaluated(run, cells, tasks=tasks, rows=[*rows, summary("passkey", "none", 256, 0.9)], **fields)
    return run


def alibi(root: Path, seed: int, **fields: Any) -> Any:
    run = made.run(root, f"alibi-1000000{seed}", "pos=alibi", seed=seed, result={"content_hash": "c0ffee"})
    cells = [cell("own", n, 3.4 - 0.05 * math.log2(n / 256)) for n in LENGTHS]
    evaluated(run, cells, rows=[summary("needle", "own", 1024)], **fields)
    return run


def two_arms(root: Path) -> Any:
    for seed in (0, 1):
        rope(root, seed)
        alibi(root, seed)
    return made.report(root, str(root))
