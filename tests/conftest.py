"""Set before anything else: offline, one thread, seeds in one place, a cache of the session's own."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="offline", WANDB_SILENT="true", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
SEED = 0


@pytest.fixture(scope="session", autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """$LMLAB_CACHE for this session: one folder for all workers, so that the corpus is prepared once."""
    root = tmp_path_factory.getbasetemp()
    cache = (root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root) / "lmlab-cache"
    cache.mkdir(exist_ok=True)
    os.environ["LMLAB_CACHE"] = str(cache)
    return cache


@pytest.fixture(scope="module", autouse=True)
def _imported_stays() -> None:
    """What is there by now stays: the collections of a thousand small trainings need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import sys

    if torch := sys.modules.get("torch"):
        torch.manual_seed(SEED)
