"""Run directories made by hand, with the figures that a test wants to find again."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lmlab.runs.files import to_json
from lmlab.runs.rundir import RunDir

CONFIG: dict[str, Any] = {
    "version": 1,
    "norm": {"name": "rmsnorm", "eps": 1e-06},
    "pos": {"name": "rope", "theta": 10000.0},
    "attn": {"name": "mha", "window": None},
    "model": {"name": "decoder", "n_layers": 4, "d_model": 128},
    "data": {"name": "sotu", "packing": "stream"},
    "tokenizer": {"name": "bpe", "vocab_size": 4096},
    "optim": {"name": "adamw", "lr": 0.003},
    "kernels": {"name": "auto"},
    "train": {"max_steps": 100, "batch_tokens": 4096, "precision": "auto", "log_every_steps": 10},
    "seed": {"all": 0, "init": None, "data": None, "dropout": None},
    "wandb": {"mode": "disabled", "tags": []},
    "paths": {"runs": "runs"},
    "compile": "auto",
    "device": "auto",
    "name": None,
    "plugins": [],
}
PARTS: dict[str, dict[str, Any]] = {
    "norm=layernorm": {"name": "layernorm", "eps": 1e-05, "bias": True},
    "pos=alibi": {"name": "alibi"},
    "attn=gqa": {"name": "gqa", "window": None, "n_kv_heads": 2},
    "tokenizer=byte": {"name": "byte"},
}
MANIFEST: dict[str, Any] = {
    "state": "finished",
    "started": "2026-01-01T00:00:00+00:00",
    "code_hash": "c0de0001",
    "fingerprint": "f1f1f1f1aaaa",
    "tokenizer_hash": "70ken001",
    "parameters": 1000,
    "flops_per_token": 6000.0,
    "resolved": {"device": "cpu", "precision": "bfloat16", "micro_batch": 32, "steps": 100, "compile": False},
    "kernels": {"attention": "sdpa", "rms_norm": "fused_rms_norm"},
    "versions": {"lmlab": "0.1.0", "torch": "2.13.0"},
    "torch": {"threads": 2, "device": "cpu"},
    "cpu": {"model": "CPU one"},
    "git": {"sha": "abcdef0123456789"},
    "choices": {},
    "changes": [],
    "data": {
        "corpus": "sotu",
        "version": "0.1.2",
        "source_hash": "50u4ce01",
        "tokenizer": {"name": "bpe", "vocab_size": 4096, "hash": "70ken001"},
        "splits": {"val": {"documents": 11, "bytes": 1000, "tokens": 250}},
    },
}


def outside(key: str) -> bool:
    """What lmlab.config.identity tells, for the keys above."""
    return key.partition(".")[0] in ("wandb", "paths", "device", "name", "plugins") or key == "train.log_every_steps"


def config(*words: str, seed: int = 0) -> dict[str, Any]:
    """CONFIG with `norm=layernorm` (a part of PARTS) or `optim.lr=0.01` set."""
    made = copy.deepcopy(CONFIG)
    made["seed"]["all"] = seed
    for word in words:
        key, _, value = word.partition("=")
        group, _, field = key.partition(".")
        if word in PARTS:
            made[group] = copy.deepcopy(PARTS[word])
        elif field:
            made[group][field] = _plain(value)
        else:
            made[group] = _plain(value)
    return made


def _plain(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


def run(
    root: Path,
    name: str,
    *words: str,
    seed: int = 0,
    bits: float | None = 2.0,
    rows: Iterable[dict[str, Any]] | None = None,
    result: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    **fields: Any,
) -> RunDir:
    """A run directory. `words` set its configuration, `bits` its val/bits_per_byte; `fields` go into its manifest."""
    made = RunDir.create(root / name, config(*words, seed=seed))
    figures = {"step": 100, "tokens": 409600, "elapsed_s": 10.0, "tokens_per_s": 5000.0, "peak_memory_bytes": 2**20}
    figures |= {} if bits is None else {"val/bits_per_byte": bits, "val/loss": 2 * bits}
    figures |= result or {}
    rows = list(ended(figures) if rows is None else rows)
    figures |= {key: rows[-1][key] for key in ("step",) if rows and key not in (result or {})}
    manifest = copy.deepcopy(MANIFEST) | {"changes": list(words), "result": figures}
    manifest["data"] = manifest["data"] | (data or {})
    made.update_manifest(**manifest | fields)
    lines = [to_json(row) + "\n" for row in rows]
    made.metrics_path.write_text("".join(lines), encoding="utf-8")
    return made


def ended(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a run with these figures: the last one holds them, as a run writes it."""
    rows = curve(figures.get("val/bits_per_byte"))
    own = {key: value for key, value in figures.items() if key.split("/")[0] in ("val", "best", "test", "tokens")}
    rows[-1] |= own
    return rows


def curve(bits: float | None, *, n: int = 10) -> list[dict[str, Any]]:
    """A row every 10 steps; val at 50 on 500 tokens, at 100 on all 1,000, with the part beside."""
    rows = []
    for i in range(1, n + 1):
        row: dict[str, Any] = {"step": 10 * i, "tokens": 40960 * i, "flops": 1e6 * i, "elapsed_s": float(i)}
        row["train/loss"] = 8.0 - i / 10
        if bits is not None and i == 5:
            row |= {"val/bits_per_byte": bits + 1, "val/tokens": 500}
        if bits is not None and i == 10:
            row |= {"val/bits_per_byte": bits, "val/tokens": 1000, "part/val/bits_per_byte": bits + 0.5}
        rows.append(row)
    return rows


def sweep(
    root: Path,
    name: str,
    arms: dict[str, Sequence[str]],
    members: Sequence[tuple[str, str, int]],
    *,
    baseline: str | None = None,
    used: str = "2026-01-01T00:00:00+00:00",
) -> Path:
    """A sweep's directory. arms: {id: words}; members: (run, arm, seed)."""
    folder = root / "sweeps" / name
    folder.mkdir(parents=True)
    plan = {
        "version": 1,
        "name": name,
        "created": used,
        "baseline": baseline or next(iter(arms)),
        "arms": {arm: {"label": " ".join(words), "config": config(*words)} for arm, words in arms.items()},
        "members": [
            {"run": run, "hash": run[-8:], "arm": arm, "seed": seed, "overrides": list(arms[arm])}
            for run, arm, seed in members
        ],
    }
    (folder / "sweep.json").write_text(json.dumps(plan), encoding="utf-8")
    (folder / "ledger.jsonl").write_text('{"event": "began"}\n', encoding="utf-8")
    return folder


def report(root: Path, *words: str, baseline: str | None = None, change: Callable[[Any], None] | None = None) -> Any:
    """The report of what `words` name under `root`."""
    from lmlab.report.build import build
    from lmlab.report.sources import opened

    with opened(words, root) as selection:
        return build(selection, outside, baseline=baseline)
