"""Slots from flags."""

from __future__ import annotations

import os
from typing import Any

import pytest

from lmlab.errors import ConfigError
from lmlab.sweep import slots
from lmlab.sweep.slots import Slot


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "cpu_count", lambda: 8)


def test_one_worker_leaves_torch_alone() -> None:
    assert slots.make(None, None, None) == [Slot(0)]


def test_workers_share_the_cores_and_the_memory() -> None:
    assert slots.make(3, None, None) == [Slot(i, threads=2, share=3) for i in range(3)]
    assert {s.threads for s in slots.make(20, None, None)} == {1}


def test_gpus_take_turns() -> None:
    made = slots.make(None, "0,1", 2)
    assert [(s.gpu, s.threads, s.share) for s in made] == [("0", 2, 2), ("1", 2, 2), ("0", 2, 2), ("1", 2, 2)]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((None, None, 2), "--runs-per-gpu 2 is given without --gpus"),
        ((2, "0,1", None), "--workers 2 and --gpus 0,1 both set the slots"),
        ((None, "0,0", None), "--gpus 0,0 is not a list of devices"),
        ((None, ",", None), "--gpus , is not a list of devices"),
    ],
)
def test_flags_that_contradict_are_refused(flags: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        slots.make(*flags)
    assert said in str(caught.value)


def test_a_slot_shows_its_process_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(slots.GPU, "7")
    Slot(0, gpu="3").enter()
    assert os.environ[slots.GPU] == "3"
