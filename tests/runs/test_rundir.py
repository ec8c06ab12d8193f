from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lmlab.errors import RunError, TrainingFailed
from lmlab.runs import files, yamlio
from lmlab.runs.claim import is_claimed
from lmlab.runs.rundir import RunDir

CONFIG: dict[str, Any] = {
    "version": 1,
    "norm": {"name": "rmsnorm", "eps": 1e-06},
    "optim": {"name": "adamw", "lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.0},
    "name": None,
}

# ---------------------------------------------------------------- config.yaml


@pytest.mark.parametrize(
    "value",
    [
        1e-06, 1e16, 1e22, 1.0, 0.1, -2.5e-300, math.inf, 5e-324, 1, 0, 10**20, True, False, None, "", " ", "1e-06",
        "1e3", "1.0", "1_000", "0x10", "0o17", "017", "1:30", "on", "no", "null", "~", "true", ".5", "5.", ".inf",
        "nan", "-", "- a", "a: b", "# x", "a #b", "'", '"', "multi\nline\n", "tab\t", "Ünïcode 文", "\u2028", "\x85",
        "\x00", "{a}", "[b", "*", "&x", "!y", "%", "@", "`", "2026-11-29", "=", "<<", [], {}, [1, [2.0, ["x"]]],
        {"a": {"b": []}}, "x" * 300, "word " * 60,
    ],
    ids=lambda v: repr(v)[:30],
)  # fmt: skip
def test_config_reads_back_exactly(tmp_path: Path, value: Any) -> None:
    run = RunDir.create(tmp_path / "r", {"version": 1, "field": value, "list": [value, value]})
    back = run.config()
    assert back == {"version": 1, "field": value, "list": [value, value]}
    assert type(back["field"]) is type(value)
    assert type(back["list"][1]) is type(value)


def test_config_is_readable_and_ordered(tmp_path: Path) -> None:
    text = yamlio.dumps(CONFIG | {"twice": [CONFIG["optim"]["betas"], CONFIG["optim"]["betas"]]})
    assert text.startswith("version: 1\nnorm:\n  name: rmsnorm\n  eps: 1.0e-06\n")
    assert "&id" not in text


def test_number_typed_by_hand_is_a_float(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("eps: 1e-6\nlr: 3E-4\nn: 10\nname: 1e\n")
    assert yamlio.read(path) == {"eps": 1e-6, "lr": 3e-4, "n": 10, "name": "1e"}


@pytest.mark.parametrize("content", [b"a: [1", b"- 1\n", b"\xff\xfe\x00", b"", b"a: !!python/object:os.system x"])
def test_damaged_config_is_named(tmp_path: Path, content: bytes) -> None:
    run = RunDir.create(tmp_path / "r", CONFIG)
    (run.path / "config.yaml").write_bytes(content)
    with pytest.raises(RunError, match=r"r/config\.yaml"):
        run.config()


# ---------------------------------------------------------------- manifest and states


def test_manifest_updates_fields_and_keeps_the_rest(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "r-00000000", CONFIG)
    run.update_manifest(state="running", a=1, started="1", x=math.nan)
    run.update_manifest(state="finished", b={"c": Path("x")}, started="2")
    manifest = run.manifest()
    assert manifest["a"] == 1
    assert manifest["b"] == {"c": "x"}
    assert manifest["x"] is None
    assert (manifest["started"], manifest["resumed"]) == ("1", "2")
    assert manifest["ended"] > "2026"
    assert sorted(p.name for p in run.path.iterdir()) == ["config.yaml", "manifest.json"]


def test_going_on_clears_how_it_ended(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "r-00000000", CONFIG)
    run.update_manifest(state="failed", error="e")
    run.update_manifest(state="running")
    assert run.manifest() == {"state": "running"}


def test_damaged_manifest_is_named(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "r", CONFIG)
    (run.path / "manifest.json").write_text('{"state": "fin')
    with pytest.raises(RunError, match=r"manifest\.json can't be read"):
        run.manifest()


def test_run_without_living_holder_is_interrupted(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "r", CONFIG)
    assert run.state() == "created"
    with run.claim():
        run.update_manifest(state="running")
        assert run.state() == "running"
        assert RunDir.open(run.path).state() == "running"
    assert run.state() == "interrupted"
    run.update_manifest(state="finished")
    assert run.state() == "finished"


def test_other_programs_config_yaml_makes_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("defaults: []\n")
    with pytest.raises(RunError, match="is not a run directory"):
        RunDir.open(tmp_path)


def test_names(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "attn-gqa-lr-0.001-0123abcd")
    assert (run.slug, run.hash, run.is_set_aside) == ("attn-gqa-lr-0.001", "0123abcd", False)
    run = RunDir(tmp_path / "x-0123abcd.old-12")
    assert (run.slug, run.hash, run.is_set_aside) == ("x", "0123abcd", True)
    assert (RunDir("renamed").slug, RunDir("renamed").hash) == ("renamed", "")


def test_tokenizer_is_saved_once(tmp_path: Path) -> None:
    class Fake:
        def save(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("{}")

    run = RunDir.create(tmp_path / "r", CONFIG)
    assert run.save_tokenizer(Fake()) == run.path / "tokenizer"
    run.save_tokenizer(Fake())
    assert [p.name for p in (run.path / "tokenizer").iterdir()] == ["tokenizer.json"]


# ---------------------------------------------------------------- claim

HOLD = """
import sys, time
from lmlab.runs.rundir import RunDir
with RunDir(sys.argv[1]).claim():
    print("held", flush=True)
    time.sleep(60)
"""


def holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_directory_in_use_names_the_holder_and_is_free_after_kill(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    process = holder(run.path)
    try:
        with pytest.raises(RunError, match=rf"in use by process {process.pid} on ") as caught, run.claim():
            pass
        assert "stop it" in caught.value.hint
        os.kill(process.pid, signal.SIGSTOP)  # a stopped process still writes when it wakes
        assert is_claimed(run.path)
    finally:
        process.kill()
        process.wait()
    with run.claim():
        assert run.is_claimed()
    assert not run.is_claimed()


def test_two_in_one_process_collide_too(tmp_path: Path) -> None:
    with RunDir(tmp_path / "r").claim(), pytest.raises(RunError, match=rf"process {os.getpid()} "):  # noqa: SIM117
        with RunDir(tmp_path / "r").claim():
            pass


def test_of_many_started_at_once_one_gets_the_directory(tmp_path: Path) -> None:
    code = (
        "import sys,time\nfrom lmlab.runs.rundir import RunDir\nfrom lmlab.errors import RunError\n"
        "time.sleep(max(0, float(sys.argv[2]) - time.time()))\n"
        "try:\n  with RunDir(sys.argv[1]).claim(): print('won', flush=True); time.sleep(1.5)\n"
        "except RunError as e: print(e)\n"
    )
    moment = str(time.time() + 1.0)
    many = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "r"), moment], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    said = [p.communicate()[0] for p in many]
    assert sum(text == "won\n" for text in said) == 1
    assert sum("is in use by process" in text and "hint:" in text for text in said) == 3


def test_children_do_not_inherit_the_claim(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    with run.claim():
        forked = os.fork()
        if forked == 0:
            time.sleep(30)
            os._exit(0)
        spawned = subprocess.Popen(["sleep", "30"], close_fds=False)
        time.sleep(0.1)
        assert RunDir(run.path).is_claimed()  # the child's close took nothing from the parent
    try:
        assert not is_claimed(run.path)
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)
        spawned.kill()
        spawned.wait()


def test_looking_does_not_disturb_a_starting_run(tmp_path: Path) -> None:
    code = (
        "import sys,time\nfrom lmlab.runs.claim import is_claimed\nfrom pathlib import Path\n"
        "print('go', flush=True)\nend=time.time()+1.5\nwhile time.time()<end: is_claimed(Path(sys.argv[1]))\n"
    )
    run = RunDir(tmp_path / "r")
    with run.claim():
        pass
    process = subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    for _ in range(50):
        with run.claim():
            pass
    process.kill()
    process.wait()


# ---------------------------------------------------------------- set aside


def test_set_aside_keeps_everything_and_numbers_on(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "r-01234567", CONFIG)
    assert run.set_aside().name == "r-01234567.old-1"
    (tmp_path / "r-01234567.old-2").write_text("a file in the way")
    RunDir.create(run.path, {"second": 1})
    old = run.set_aside()
    assert old.name == "r-01234567.old-3"
    assert old.config() == {"second": 1}
    assert RunDir(tmp_path / "r-01234567.old-1").config() == CONFIG


def test_set_aside_within_a_claim_holds_the_fresh_directory(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "r-01234567", CONFIG)
    with run.claim():
        old = run.set_aside()
        assert not is_claimed(old.path)
        assert is_claimed(run.path)
        assert not run.exists()
        run.write_config(CONFIG)
    assert not is_claimed(run.path)


def test_run_in_use_is_not_set_aside(tmp_path: Path) -> None:
    process = holder(tmp_path / "r")
    try:
        with pytest.raises(RunError, match="in use"):
            RunDir(tmp_path / "r").set_aside()
        assert (tmp_path / "r").is_dir()
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------- folders that can't be written


def test_runs_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunError, match=r"could not write .*runs/r"), RunDir(tmp_path / "runs" / "r").claim():
        pass


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [(28, TrainingFailed, "the disk is full"), (13, RunError, "may not write"), (30, RunError, "may not write")],
)
def test_unwritable_and_full_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], text: str
) -> None:
    run = RunDir.create(tmp_path / "r", CONFIG)

    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "fsync", refuse)
    with pytest.raises(kind, match=text):
        run.update_manifest(a=1)
    monkeypatch.undo()
    assert "a" not in run.manifest()
    assert sorted(p.name for p in run.path.iterdir()) == ["config.yaml", "manifest.json"]


def test_strict_json_has_no_nan() -> None:
    import numpy as np

    value = {
        "a": math.nan,
        "b": [math.inf, 1.5],
        "c": np.float32(0.5),
        "d": np.int64(3),
        "e": (1, 2),
        "f": np.float64("nan"),
    }
    assert json.loads(files.to_json(value)) == {"a": None, "b": [None, 1.5], "c": 0.5, "d": 3, "e": [1, 2], "f": None}
