"""The sweep's directory: its name, its plan that grows, its ledger that many write."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from lmlab.errors import RunError
from lmlab.sweep.folder import LEDGER, PLAN, SweepFolder, sweep_name
from lmlab.sweep.members import compose
from lmlab.sweep.space import read


def named(words: list[str], seeds: int | None = None, name: str | None = None) -> str:
    space = read(words, seeds=seeds)
    return sweep_name(space, compose(space)[0], name)


def test_more_seeds_and_another_order_are_the_same_sweep() -> None:
    one = named(["norm=rmsnorm,layernorm", "pos=rope"])
    assert one == named(["norm=rmsnorm,layernorm", "pos=rope"], seeds=3)
    assert one == named(["pos=rope", "norm=layernorm,rmsnorm"], seeds=2)
    assert one.startswith("norm-")
    assert one != named(["norm=rmsnorm,layernorm", "pos=alibi"])
    assert named(["norm=rmsnorm,layernorm"], name="first").startswith("first-")


def test_the_plan_grows_and_keeps_its_order(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "s")
    two, _ = compose(read(["norm=rmsnorm,layernorm"], seeds=1))
    four, _ = compose(read(["norm=rmsnorm,layernorm"], seeds=2))
    folder.add(two, command=["lmlab", "sweep"], words=["norm=rmsnorm,layernorm"], baseline=two[0].arm)
    folder.add(four)
    plan = json.loads((folder.path / PLAN).read_text())
    assert [(m["hash"], m["seed"]) for m in plan["members"]] == [
        (m.hash, m.seed) for m in (four[0], four[2], four[1], four[3])
    ]
    assert plan["baseline"] == two[0].arm
    assert plan["command"] == ["lmlab", "sweep"]
    assert {a["label"] for a in plan["arms"].values()} == {"norm=rmsnorm", "norm=layernorm"}
    assert plan["arms"][two[1].arm]["config"]["norm"]["name"] == "layernorm"


def _write(path: str, number: int) -> None:
    for i in range(200):
        SweepFolder(Path(path)).log("began", f"run-{number}-{i}", error="x" * 300)


def test_two_processes_write_whole_lines_into_one_ledger(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(str(tmp_path / "s"), n)) for n in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    events = SweepFolder(tmp_path / "s").events()
    assert {e["run"] for e in events} == {f"run-{n}-{i}" for n in range(2) for i in range(200)}


def test_damaged_lines_of_the_ledger_are_passed_over(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    folder.log("began", "a")
    with (tmp_path / LEDGER).open("a") as f:
        f.write('{"torn": \n[1]\n')
    folder.log("finished", "a")
    assert [e["event"] for e in folder.events()] == ["began", "finished"]


@pytest.mark.parametrize("content", ["{", "[]", '{"members": 3}'])
def test_a_damaged_plan_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / PLAN).write_text(content)
    with pytest.raises(RunError) as caught:
        SweepFolder(tmp_path).plan()
    assert "sweep.json" in str(caught.value)
    assert "hint: " in str(caught.value)
