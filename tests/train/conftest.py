"""A corpus and an experiment small enough to train in a second."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORDS = "the of a to in is that model norm head value key query token loss step rate curve noise seed run".split()
SMALL = (
    "tokenizer=byte model=nano model.n_layers=2 model.d_model=32 model.n_heads=4 model.seq_len=16 "
    "train.batch_tokens=128 train.max_steps=20 train.precision=fp32 wandb.mode=disabled"
).split()


def write_corpus(folder: Path, n_docs: int = 24, n_words: int = 200) -> str:
    """Documents of seeded random words; returns the glob that names them."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(n_docs):
        text = " ".join(rng.choice(WORDS) for _ in range(n_words))
        (folder / f"{i:03d}.txt").write_text(text, encoding="utf-8")
    return f"{folder}/*.txt"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def small_words(corpus: str, runs: Path) -> list[str]:
    """Overrides of a small experiment whose runs lie in that folder."""
    data = ["data=text", f"data.files=['{corpus}']", "data.val_frac=0.2", "data.test_frac=0.2"]
    return [*SMALL, *data, f"paths.runs={runs}"]


@pytest.fixture
def small(corpus: str, tmp_path: Path) -> list[str]:
    """Overrides of a small experiment whose runs lie in tmp_path/runs."""
    return small_words(corpus, tmp_path / "runs")


@pytest.fixture
def trainer(small: list[str], cache_dir: Path) -> Callable[..., Any]:
    """trainer(*overrides, micro_rows=8) → a Trainer of the small experiment with these overrides."""

    def make(*overrides: str, micro_rows: int = 8) -> Any:
        import torch

        from lmlab.config.load import load
        from lmlab.data.prepare import prepare
        from lmlab.kernels.resolve import resolve
        from lmlab.train.device import resolve_precision
        from lmlab.train.setup import Trainer

        keys = {o.partition("=")[0] for o in overrides}
        exp = load([*(o for o in small if o.partition("=")[0] not in keys), *overrides]).experiment
        device = torch.device("cpu")
        dtype = resolve_precision(exp.train.precision, device)
        prepared = prepare(exp.data, exp.tokenizer, cache_dir)
        ops = resolve(exp.kernels, device, dtype)
        return Trainer.make(exp, prepared, ops=ops, device=device, dtype=dtype, micro_rows=micro_rows, compiled=False)

    return make
