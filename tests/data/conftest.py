"""The embedded corpus, prepared once for the session, and numbered tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_cases import write

from lmlab.data.prepare import Prepared, prepare
from lmlab.data.spec import BPE, Sotu
from lmlab.data.tokens import TokenFile


@pytest.fixture(scope="session")
def sotu(cache_dir: Path) -> Prepared:
    """`data=sotu tokenizer=bpe` of 4,096 ids, from the cache that all workers share."""
    return prepare(Sotu(), BPE(), cache_dir)


@pytest.fixture
def numbered(tmp_path: Path) -> Callable[..., TokenFile]:
    """A token file of n ids where id = place, so that a token says where it came from."""

    def make(n: int, name: str = "train") -> TokenFile:
        return write(tmp_path / f"{name}-{n}.bin", [np.arange(1, n)], vocab_size=max(n, 2))

    return make
