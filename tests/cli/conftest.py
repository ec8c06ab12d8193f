"""Runs in this process, and in forked children that may be killed."""

from __future__ import annotations

import io
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import corpus, small, trainer  # noqa: F401  # the same small experiment


def run_here(overrides: list[str], **flags: Any) -> Any:
    """run_one on the overrides, silently. Returns its Result."""
    from rich.console import Console

    from lmlab.cli.progress import Screen
    from lmlab.cli.run_one import Flags, run_one
    from lmlab.inherit import composed

    screen = Screen(Console(file=io.StringIO(), width=200))
    result = run_one(composed(overrides), Flags(tune_malloc=False, **flags), screen, ["lmlab", "train", *overrides])
    result.said = screen.console.file.getvalue()  # type: ignore[attr-defined]
    return result


def _child(overrides: list[str], prepare: Callable[[], None] | None, flags: dict[str, Any]) -> None:
    if prepare is not None:
        prepare()
    os._exit(run_here(overrides, **flags).exit_code)


def start_child(overrides: list[str], prepare: Callable[[], None] | None = None, **flags: Any) -> Any:
    """The same in a forked child: a Process that can be killed at any moment. `prepare` runs in the child first."""
    process = multiprocessing.get_context("fork").Process(target=_child, args=(overrides, prepare, flags))
    process.start()
    return process


def few_documents(folder: Path) -> list[str]:
    """Words for a corpus of forty short documents, which are written into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(40):
        (folder / f"{n}.txt").write_text(f"Document {n} says that {n} and {n + 1} make {2 * n + 1}. " * 8)
    return ["data=text", f"data.files=['{folder}/*.txt']", "data.val_frac=0.2"]


@pytest.fixture
def in_tmp(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    return tmp_path
