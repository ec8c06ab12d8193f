"""Batches made ahead are the batches made when asked for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmlab.data.batches import Batch
from lmlab.data.prefetch import Ahead, ahead


def batch(k: int) -> Batch:
    tokens = torch.full((2, 3), k)
    return Batch(tokens, tokens + 1, torch.arange(3).expand(2, 3), None, torch.ones(2, 3))


def test_the_next_batch_is_made_by_a_thread_while_this_one_is_in_use() -> None:
    made: dict[int, str] = {}
    done = {k: threading.Event() for k in range(6)}

    def make(k: int) -> Batch:
        made[k] = threading.current_thread().name
        done[k].set()
        return batch(k)

    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        batches = Ahead(make, pool, end=4)
        for k in range(4):
            assert batches(k).hash() == batch(k).hash()
            assert k == 3 or done[k + 1].wait(5)  # nobody has asked for it yet
    assert made[0] == threading.current_thread().name
    assert all(made[k].startswith("batches") for k in (1, 2, 3))
    assert sorted(made) == [0, 1, 2, 3]  # none past the end


def test_another_batch_than_the_next_is_made_as_it_is_asked_for() -> None:
    with ThreadPoolExecutor(1) as pool:
        batches = Ahead(batch, pool, end=100)
        assert [int(batches(k).tokens_BT[0, 0]) for k in (0, 7, 8, 3)] == [0, 7, 8, 3]


def test_what_goes_wrong_ahead_is_raised_when_the_batch_is_asked_for() -> None:
    def make(k: int) -> Batch:
        if k == 1:
            raise OSError("the disk is gone")
        return batch(k)

    with ThreadPoolExecutor(1) as pool:
        batches = Ahead(make, pool, end=3)
        batches(0)
        with pytest.raises(OSError, match="the disk is gone"):
            batches(1)


def test_only_an_accelerator_is_worked_ahead_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []

    def pin(self: Batch) -> Batch:
        pinned.append(int(self.tokens_BT[0, 0]))
        return self

    monkeypatch.setattr(Batch, "pinned", pin)
    source: Any = SimpleNamespace(batch=batch)
    with ahead(source, torch.device("cpu"), 3) as batches:
        assert batches is source.batch
    with ahead(source, torch.device("cuda"), 3) as batches:
        assert [batches(k).hash() for k in range(3)] == [batch(k).hash() for k in range(3)]
    assert pinned == [0, 1, 2]


def test_a_pinned_batch_keeps_rows_that_are_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    found = batch(5).pinned()
    assert found.hash() == batch(5).hash()
    assert found.positions_BT.stride(0) == 0
    assert found.documents_BT is None
