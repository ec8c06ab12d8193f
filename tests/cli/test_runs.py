from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lmlab.cli import runs as command
from lmlab.errors import ConfigError, LmlabError, RunError
from lmlab.runs.metrics import Metrics
from lmlab.runs.rundir import RunDir

CONFIG: dict[str, Any] = {
    "version": 1,
    "norm": {"name": "rmsnorm", "eps": 1e-06},
    "optim": {"name": "adamw", "lr": 0.003},
    "seed": {"all": 0},
    "name": None,
}


def make(root: Path, name: str, *, steps: int = 100, bits: float = 1.8, lr: float = 0.003, **fields: Any) -> RunDir:
    run = RunDir.create(root / name, CONFIG | {"optim": {"name": "adamw", "lr": lr}})
    with Metrics(run.metrics_path) as rows:
        for step in range(10, steps + 1, 10):
            rows.append({"step": step, "train/loss": 3.0, "train/tokens_per_s": 5000.0 + step})
        rows.append({"step": steps + 1, "val/loss": 2.5, "val/bits_per_byte": bits})
    facts = {
        "state": "finished",
        "started": datetime.now(UTC).isoformat(),
        "changes": [f"optim.lr={lr}"] if lr != 0.003 else [],
        "resolved": {"steps": steps},
        "versions": {"torch": "2.13.0"},
        "fingerprint": "f1",
        "result": {"step": steps, "val/loss": 2.5, "val/bits_per_byte": bits, "tokens_per_s": 5000.0},
    }
    run.update_manifest(**facts | fields)
    return run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    day = (datetime.now(UTC) - timedelta(days=1)).isoformat()
    make(root, "default-0123abcd", code_hash="of other code", started=day)
    make(root, "lr-0.01-0199ffff", lr=0.01, bits=1.75, versions={"torch": "2.14.0"}, fingerprint="f2")
    make(root, "default-0123abcd.old-1", bits=9.0)
    going = make(root, "alive-77771111", steps=40, state="running", result={})
    going.update_manifest(resolved={"steps": 300})
    return root


def call(*words: str) -> str:
    app = typer.Typer()
    command.register(app)
    result = CliRunner().invoke(app, ["runs", *words])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_ls_shows_every_run_with_its_state(root: Path) -> None:
    lines = call("ls", f"paths.runs={root}").splitlines()
    assert lines[0].split() == ["run", "state", "steps", "val", "bits/byte", "tokens/s", "age", "changes"]
    by_name = {line.split()[0]: line for line in lines[1:]}
    assert len(by_name) == 4
    assert "finished, stale" in by_name["default-0123abcd"]
    assert "set aside" in by_name["default-0123abcd.old-1"]
    assert "interrupted" in by_name["alive-77771111"]
    assert "41/300" in by_name["alive-77771111"]
    assert "5,040" in by_name["alive-77771111"]
    assert "optim.lr=0.01" in by_name["lr-0.01-0199ffff"]
    assert "1.7500" in by_name["lr-0.01-0199ffff"]
    assert lines[-1].startswith("default-0123abcd ")  # the oldest is last


def test_ls_json(root: Path) -> None:
    found = {line["name"]: line for line in json.loads(call("ls", f"paths.runs={root}", "--json"))}
    assert found["lr-0.01-0199ffff"]["val_bits_per_byte"] == 1.75
    assert found["default-0123abcd"]["stale"] is True
    assert found["default-0123abcd.old-1"]["set_aside"] is True
    assert found["alive-77771111"]["state"] == "interrupted"


def test_ls_cuts_no_value_off_a_terminal(root: Path) -> None:
    long = [f"attn.some_long_field_{i}={'value' * 5}" for i in range(20)]
    make(root, "long-abcdef01", changes=long)
    text = call("ls", f"paths.runs={root}")
    assert " ".join(long) in text
    assert "…" not in text


def test_ls_goes_on_past_a_damaged_run(root: Path) -> None:
    (root / "default-0123abcd" / "manifest.json").write_text("{")
    text = call("ls", f"paths.runs={root}")
    assert "unreadable" in text
    assert len(text.splitlines()) == 5


def test_ls_of_nothing(tmp_path: Path) -> None:
    assert call("ls", f"paths.runs={tmp_path}") == ""
    assert json.loads(call("ls", f"paths.runs={tmp_path}", "--json")) == []


def test_show_has_all_parts(root: Path) -> None:
    make(root, "dirty-abcdef01", git={"sha": "s", "diff": "a\nb\n", "diff_hash": "h"})
    text = call("show", "dirty", f"paths.runs={root}")
    assert "state: finished" in text
    assert "eps: 1.0e-06" in text
    assert "val/bits_per_byte: 1.8" in text
    assert "2 lines, in manifest.json" in text
    found = json.loads(call("show", "dirty", f"paths.runs={root}", "--json"))
    assert found["manifest"]["git"]["diff"] == "a\nb\n"
    assert found["config"] == CONFIG
    assert found["last"]["step"] == 101
    assert found["result"]["step"] == 100


def test_diff_names_both_values_by_section(root: Path) -> None:
    found = json.loads(call("diff", "0123", "0199", f"paths.runs={root}", "--json"))
    assert found["config"] == {"optim.lr": [0.003, 0.01]}
    assert found["data"] == {"fingerprint": ["f1", "f2"]}
    assert found["code"] == {"code_hash": ["of other code", None]}
    assert found["environment"] == {"versions.torch": ["2.13.0", "2.14.0"]}
    assert found["results"] == {"val/bits_per_byte": [1.8, 1.75]}
    lines = call("diff", "0123", "0199", f"paths.runs={root}").splitlines()
    assert lines[0].split() == ["key", "default-0123abcd", "lr-0.01-0199ffff"]
    assert ["config", "optim.lr", "0.003", "0.01"] in [line.split() for line in lines]
    assert call("diff", "0123", "0123", f"paths.runs={root}") == ""


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["show"], ConfigError, "takes one run, none given"),
        (["show", "a", "b"], ConfigError, "takes one run, 2 given: a b"),
        (["diff", "a"], ConfigError, "takes two runs, 1 given: a"),
        (["ls", "norm=rmsnorm"], ConfigError, "takes no run, 1 given: norm=rmsnorm"),
        (["show", "nowhere"], RunError, "no run nowhere"),
    ],
)
def test_wrong_words(root: Path, words: list[str], kind: type[LmlabError], message: str) -> None:
    with pytest.raises(kind, match=message):
        call(*words, f"paths.runs={root}")


CODE = """
import sys, time
import typer
from lmlab.cli import runs
app = typer.Typer()
runs.register(app)
started = time.perf_counter()
try: app(["runs", *sys.argv[1:]])
except SystemExit as e: assert not e.code, e.code
print(time.perf_counter() - started, "torch" in sys.modules, "hydra" in sys.modules, file=sys.stderr)
"""


def test_200_runs_are_listed_quickly_and_without_torch(tmp_path: Path) -> None:
    for i in range(200):
        make(tmp_path, f"run-{i:08x}", code_hash="x")
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", CODE, "ls", f"paths.runs={tmp_path}"], capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == 201
    seconds, torch, hydra = done.stderr.split()
    assert (torch, hydra) == ("False", "False")
    assert float(seconds) < 2.0, f"{seconds} s of {time.perf_counter() - started}"


@pytest.mark.parametrize("words", [["show", "0123"], ["diff", "0123", "0199"]])
def test_show_and_diff_import_no_torch(root: Path, words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *words, f"paths.runs={root}"], capture_output=True, text=True, check=True
    )
    assert done.stderr.split()[1:] == ["False", "False"]
