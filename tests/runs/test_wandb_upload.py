from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmlab.cli.upload import upload, wanted
from lmlab.errors import RunError
from lmlab.runs import wandb_file, wandb_mirror, wandb_run, wandb_upload
from lmlab.runs.metrics import Metrics
from lmlab.runs.rundir import RunDir
from lmlab.runs.wandb_run import Mark
from tests.runs.test_wandb_mirror import read
from tests.runs.wandb_file import offline_files
from tests.runs.wandb_server import ServedRun, Server, serve

ROWS = [{"step": 10 * s, "train/loss": 1 / s, "val/loss": None} for s in range(1, 8)]


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with serve() as server:  # one for the module: a process tells W&B its key once per server
        yield server


@pytest.fixture
def server(running: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Server:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(wandb_run.QUIET, "base_url", running.url)
    running.runs.clear()
    running.requests.clear()
    running.refuse = False
    return running


def make(root: Path, name: str, rows: int = 7, **wandb: Any) -> RunDir:
    run = RunDir.create(root / name, {"norm": {"name": "rmsnorm"}, "wandb": {"project": "proj", "tags": []} | wandb})
    run.update_manifest(state="finished", result={"val/loss": 1.25})
    with Metrics(run.metrics_path) as file:
        for row in ROWS[:rows]:
            file.append(row)
    return run


def add(run: RunDir, rows: list[dict[str, Any]]) -> None:
    with Metrics(run.metrics_path) as file:
        for row in rows:
            file.append(row)


def mirror(run: RunDir, rows: list[dict[str, Any]], mode: str) -> None:
    spec = {"mode": mode, "project": "proj"}
    live = wandb_mirror.start(spec, run_path=run.path, run_id=run.hash, name=run.name, config={})
    for row in rows:
        live.log(row)
    live.finish({}, 0)


def mirror_offline(run: RunDir, rows: list[dict[str, Any]]) -> None:
    mirror(run, rows, "offline")
    read(offline_files(run.path)[-1])


def sync(server: Server, run: RunDir) -> str:
    """What W&B's own documentation tells its users to type."""
    line = [sys.executable, "-m", "wandb", "sync", *(str(path.parent) for path in offline_files(run.path))]
    environment = os.environ | {"WANDB_BASE_URL": server.url, "WANDB_SILENT": "false"}
    return subprocess.run(line, env=environment, cwd=run.path, capture_output=True, text=True, timeout=60).stderr


def the_run(server: Server) -> ServedRun:
    (run,) = server.runs.values()
    return run


def received(run: ServedRun) -> list[int]:
    """The step of every row that ever came."""
    return [row["step"] for row in run.received]


def test_upload_sends_all_then_nothing_then_what_is_new(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    run, there_too = make(tmp_path, "a-0123abcd", group="g", tags=["t"]), f"paths.runs={tmp_path}"
    upload(["a-0123abcd", there_too])
    assert capsys.readouterr().out.startswith("a-0123abcd  7 rows sent  http")
    there = the_run(server)
    assert [{k: v for k, v in row.items() if k in ROWS[0]} for row in there.rows()] == ROWS
    assert [row["_step"] for row in there.rows()] == [row["step"] for row in ROWS]
    assert (there.name, there.project, there.group, there.tags) == ("a-0123abcd", "proj", "g", ["t"])
    assert there.config["norm"]["value"] == {"name": "rmsnorm"}
    assert there.summary["val/loss"] == 1.25
    assert set(there.exit_codes) == {0}

    n_requests = len(server.requests)
    upload(["a", there_too])
    assert capsys.readouterr().out == "a-0123abcd  nothing to send\n"
    assert len(server.requests) == n_requests

    add(run, [{"step": 80}, {"step": 90}])
    upload(["0123abcd", there_too], as_json=True)
    (said,) = json.loads(capsys.readouterr().out)
    assert (said["run"], said["rows"]) == ("a-0123abcd", 2)
    assert received(the_run(server)) == [10, 20, 30, 40, 50, 60, 70, 80, 90]


def test_upload_asks_the_server_where_the_mark_is_lost(tmp_path: Path, server: Server) -> None:
    """As in a copy of the run that was made before the upload; and a run that was disabled can be uploaded as well."""
    run = make(tmp_path, "a-0123abcd", mode="disabled")
    upload(["a", f"paths.runs={tmp_path}"])
    replace(Mark.of(run.path, run.hash), step=-1, uploaded=-1).write(run.path)
    add(run, [{"step": 80}])
    upload(["a", f"paths.runs={tmp_path}"])
    assert received(the_run(server)) == [10, 20, 30, 40, 50, 60, 70, 80]


def test_upload_and_wandb_sync_mix(tmp_path: Path, server: Server) -> None:
    """Two offline segments are synced into one history; upload adds the rest, and a later sync has nothing to do."""
    run = make(tmp_path, "a-0123abcd", rows=0)
    mirror_offline(run, ROWS[:2])
    mirror_offline(run, ROWS[2:4])
    assert sync(server, run).count("Finished syncing") == 2
    assert [row["step"] for row in the_run(server).rows()] == [10, 20, 30, 40]
    mirror_offline(run, ROWS[4:6])
    add(run, ROWS)
    upload([f"paths.runs={tmp_path}"])
    assert "Skipped 3 synced run(s)" in sync(server, run)
    assert received(the_run(server)) == [10, 20, 30, 40, 50, 60, 70]
    mirror_offline(run, [*ROWS, {"step": 80}])
    assert wandb_file.steps(offline_files(run.path)[-1]) == ([80], True)


def test_refused_rows_are_reported_and_sent_the_next_time(tmp_path: Path, server: Server) -> None:
    run = make(tmp_path, "a-0123abcd")
    server.refuse = True
    with pytest.raises(RunError) as error:
        upload(["a", f"paths.runs={tmp_path}"])
    assert error.value.message == "W&B has a-0123abcd up to step 0 of 70 only"
    assert error.value.hint == "give the same command again: what W&B has is not sent twice"
    assert Mark.of(run.path, run.hash).uploaded == -1
    server.refuse = False
    upload(["a", f"paths.runs={tmp_path}"])
    assert received(the_run(server)) == [10, 20, 30, 40, 50, 60, 70]


def test_one_failing_run_does_not_keep_the_others(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make(tmp_path, "a-00000001")
    make(tmp_path, "b-00000002")
    with first.claim(), pytest.raises(RunError, match="in use"):
        upload(["00000001", "00000002", f"paths.runs={tmp_path}"])
    assert capsys.readouterr().out.startswith("b-00000002  7 rows sent")


def test_online_mirror_goes_on_from_what_the_server_has(tmp_path: Path, server: Server) -> None:
    """The mark says 50 was handed over, but a kill lost 40 and 50 on their way: the server has 30."""
    run = make(tmp_path, "a-0123abcd", rows=0)
    mirror(run, ROWS[:3], "online")
    assert received(the_run(server)) == [10, 20, 30]
    replace(Mark.of(run.path, run.hash), step=50).write(run.path)
    add(run, ROWS[:5])
    mirror(run, ROWS[5:], "online")
    assert received(the_run(server)) == [10, 20, 30, 40, 50, 60, 70]


def test_online_mirror_sends_what_is_offline_only_and_keeps_sync_from_it(tmp_path: Path, server: Server) -> None:
    run = make(tmp_path, "a-0123abcd", rows=0)
    mirror_offline(run, ROWS[:3])
    add(run, ROWS[:3])
    mirror(run, ROWS[3:], "online")
    assert received(the_run(server)) == [10, 20, 30, 40, 50, 60, 70]
    assert offline_files(run.path)[0].with_suffix(".wandb.synced").exists()


def make_sweep(root: Path) -> None:
    """Two members, one of them under another name, and a third that was never begun; a run outside the sweep."""
    for name in ("a-00000001", "renamed-00000002", "other-00000003"):
        make(root, name, rows=2)
    members = [
        {"run": "a-00000001", "hash": "00000001", "arm": "a", "seed": 0},
        {"run": "b-00000002", "hash": "00000002", "arm": "b", "seed": 0},
        {"run": "c-00000004", "hash": "00000004", "arm": "b", "seed": 1},
    ]
    (root / "sweeps" / "s-12345678").mkdir(parents=True)
    labels = {"a": "norm=rmsnorm pos=rope", "b": "pattern=" + "S" * 90}
    arms = {arm: {"label": label, "config": {"version": 1}} for arm, label in labels.items()}
    plan = {"version": 1, "name": "s-12345678", "arms": arms, "members": members}
    (root / "sweeps" / "s-12345678" / "sweep.json").write_text(json.dumps(plan))


def test_sweep_is_a_group_and_its_members_are_tagged(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    make_sweep(tmp_path)
    upload(["s-12345678", f"paths.runs={tmp_path}"])
    assert [line.split("  ")[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["a-00000001", "2 rows sent"],
        ["renamed-00000002", "2 rows sent"],
    ]
    by_name = {run.name: run for run in server.runs.values()}
    assert {run.group for run in by_name.values()} == {"s-12345678"}
    assert by_name["a-00000001"].tags == ["norm=rmsnorm", "pos=rope"]
    assert [len(tag) for tag in by_name["renamed-00000002"].tags] == [64]
    metrics = [run.config["_wandb"]["value"]["m"] for run in by_name.values()]
    assert metrics[0] == metrics[1]
    assert "step" in json.dumps(metrics[0])


# ---------------------------------------------------------------- which runs, and what can go wrong


def test_without_words_every_mirrored_run_is_wanted(tmp_path: Path) -> None:
    mirrored, aside = make(tmp_path, "a-00000001"), make(tmp_path, "b-00000002.old-1")
    make(tmp_path, "c-00000003")
    for run in (mirrored, aside):
        Mark("x").write(run.path)
    assert [one.run.name for one in wanted([], tmp_path)] == ["a-00000001"]
    assert wanted([], tmp_path / "none") == []


def test_run_named_twice_is_wanted_once(tmp_path: Path) -> None:
    make_sweep(tmp_path)
    found = wanted(["s-12345678", str(tmp_path / "sweeps" / "s-12345678"), "a-00000001", "other"], tmp_path)
    assert [one.run.name for one in found] == ["a-00000001", "renamed-00000002", "other-00000003"]


@pytest.mark.parametrize("ref", ["s", "s-12345678", "1234"])
def test_a_sweep_is_found_by_slug_name_or_hash(tmp_path: Path, ref: str) -> None:
    make_sweep(tmp_path)
    assert len(wanted([ref], tmp_path)) == len(wanted([str(tmp_path / "sweeps" / "s-12345678")], tmp_path)) == 2


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"there is no folder {tmp_path}/nowhere"):
        upload([f"paths.runs={tmp_path}/nowhere"])


def test_wrong_names_and_damaged_sweeps_are_named(tmp_path: Path) -> None:
    make_sweep(tmp_path)
    with pytest.raises(RunError, match="no run othre in"):
        wanted(["othre"], tmp_path)
    (tmp_path / "sweeps" / "s-12345678" / "sweep.json").write_text('{"arms": {}, "members": [{}]}')
    with pytest.raises(RunError, match=r"sweep\.json can't be read"):
        wanted(["s-12345678"], tmp_path)


def test_no_key_and_no_wandb_are_two_line_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_upload, "has_key", lambda _: False)
    with pytest.raises(RunError) as no_key:
        wandb_upload.ready(tmp_path)
    assert str(no_key.value) == "error: W&B has no key\nhint: `wandb login`, or set WANDB_API_KEY"
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RunError, match="W&B is not installed"):
        wandb_upload.ready(tmp_path)


def test_run_without_rows_is_not_sent(tmp_path: Path) -> None:
    assert wandb_upload.upload(make(tmp_path, "a-00000001", rows=0), None).rows == 0
