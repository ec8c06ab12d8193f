"""`lmlab report` as a command: what it prints, writes and refuses."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from lmlab.cli import report as command
from lmlab.cli.complete import candidates, split
from lmlab.errors import ConfigError, LmlabError, RunError
from tests.report import made


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two arms, two seeds, in ./runs, and a sweep of the first of each."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "runs"
    made.run(root, "a-00000001", seed=0, bits=2.0, started="2026-01-01")
    made.run(root, "a-00000002", seed=1, bits=2.2, started="2026-01-01")
    made.run(root, "b-00000003", "norm=layernorm", seed=0, bits=1.9, started="2026-01-02")
    made.run(root, "b-00000004", "norm=layernorm", seed=1, bits=2.0, started="2026-01-02")
    return root


def swept(root: Path) -> None:
    arms = {"ln": ["norm=layernorm"], "rms": []}
    made.sweep(root, "norm-aaaa0001", arms, [("b-00000003", "ln", 0), ("a-00000001", "rms", 0)])


def call(*words: str) -> Result:
    app = typer.Typer()
    command.register(app)
    app.command("other")(lambda: None)
    result = CliRunner().invoke(app, ["report", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# ---------------------------------------------------------------- what it prints and writes


def test_the_table_is_on_stdout_and_the_page_in_reports(root: Path) -> None:
    pytest.importorskip("lmlab.report.page")
    result = call()
    # by hand: −0.1 and −0.2 over the two seeds
    assert "−0.1500 ± 0.0707" in result.stdout
    assert "written: runs/reports/all-runs/report.html" in result.stderr
    assert files(root / "reports") == ["all-runs/report.html"]


def test_the_newest_sweep_is_taken_and_names_the_folder(root: Path) -> None:
    swept(root)
    result = call("--format", "terminal,md,csv,json")
    assert result.stdout.startswith("norm-aaaa0001\n")
    assert files(root / "reports") == [
        f"norm-aaaa0001/{name}" for name in ("arms.csv", "report.json", "report.md", "runs.csv")
    ]


def test_out_names_the_folder(root: Path, tmp_path: Path) -> None:
    result = call("a-00000001", "b-00000003", "--format", "md", "--out", str(tmp_path / "deep" / "here"))
    assert result.stdout == ""
    assert files(tmp_path / "deep") == ["here/report.md"]
    assert result.stderr == f"written: {tmp_path}/deep/here/report.md\n"


def test_two_mixtures_do_not_share_a_folder(root: Path) -> None:
    call("a-00000001", "b-00000003", "--format", "md")
    call("a-00000001", "b-00000004", "--format", "md")
    assert len(files(root / "reports")) == 2


def test_one_text_on_stdout(root: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(call("--format", "csv", "--out", "-").stdout)))
    assert [row["arm"] for row in rows] == ["norm=rmsnorm", "norm=layernorm"]
    assert call("--format", "md", "--out", "-").stdout.startswith("# all runs\n")
    assert json.loads(call("--format", "json", "--out", "-").stdout)["axes"] == ["norm"]
    assert not (root / "reports").exists()


def test_json_is_on_stdout_and_no_file_is_written(root: Path) -> None:
    result = call("--json")
    assert json.loads(result.stdout)["arms"][1]["delta"]["n"] == 2
    assert result.stderr == ""
    assert not (root / "reports").exists()


def test_json_with_out_is_the_same_as_without(root: Path) -> None:
    assert json.loads(call("--json", "--out", "-").stdout)["axes"] == ["norm"]
    assert json.loads(call("--json", "--out", "-", "--format", "json").stdout)["axes"] == ["norm"]
    assert not (root / "reports").exists()


def test_runs_that_can_not_be_read_are_no_fault_of_the_command(root: Path) -> None:
    """Exit status 1, as of a run that failed; 2 is for what was typed wrong."""
    for run in root.iterdir():
        (run / "config.yaml").write_text("[]")
    with pytest.raises(RunError) as caught:
        call()
    assert caught.value.message == "none of 4 runs can be read: config.yaml holds no mapping"
    assert caught.value.exit_code == 1


def test_an_edited_configuration_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash of the default composition is that of its name, until a value in config.yaml is another."""
    from lmlab.config.catalogue import default_experiment
    from lmlab.config.identity import config_hash, to_dict
    from lmlab.runs.rundir import RunDir

    monkeypatch.chdir(tmp_path)
    default = default_experiment()
    run = RunDir.create(tmp_path / "runs" / f"x-{config_hash(default)}", to_dict(default))
    run.update_manifest(state="stopped")
    (note,) = [*json.loads(call("--json").stdout)["notes"], "none"]
    assert note == "none"
    default.optim.lr *= 2
    run.write_config(to_dict(default))
    (note,) = json.loads(call("--json").stdout)["notes"]
    assert note == (
        f"{run.name}: config.yaml was edited: its hash is {config_hash(default)}, the directory's {run.hash}"
    )


def test_another_folder_of_runs(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    found = json.loads(call("b-00000003", f"paths.runs={root}", "--json").stdout)
    assert [run["run"] for run in found["runs"]] == ["b-00000003"]


def test_baseline(root: Path) -> None:
    found = json.loads(call("--baseline", "norm=layernorm", "--json").stdout)
    assert (found["baseline"], found["arms"][0]["delta"]["mean"]) == (1, pytest.approx(0.15))


def test_runs_of_which_none_finished_are_shown(root: Path) -> None:
    for run in root.iterdir():
        manifest = json.loads((run / "manifest.json").read_text())
        (run / "manifest.json").write_text(json.dumps(manifest | {"state": "failed", "error": "error: out of memory"}))
    result = call("--format", "terminal")
    assert result.exit_code == 0
    assert result.stdout.count("0/2 · 2 failed") == 2
    assert result.stdout.count("out of memory") == 4


def test_bundle_and_back(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = call("--bundle", "out.zip", "--json")
    assert result.stderr == "written: out.zip\n"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    then, now = json.loads(result.stdout), json.loads(call("../out.zip", "--json").stdout)
    assert [key for key in then if then[key] != now[key] and key != "made"] == ["source"]
    assert files(elsewhere) == []


def test_identity_decides_what_is_compared(root: Path) -> None:
    """Intervals and folders are no part of a run's identity: runs that differ in them are one arm."""
    made.run(root, "a-00000005", "train.log_every_steps=1", "wandb.mode=online", seed=2)
    assert [len(arm["runs"]) for arm in json.loads(call("--json").stdout)["arms"]] == [3, 2]


# ---------------------------------------------------------------- what it refuses

REFUSED: dict[str, tuple[list[str], type[LmlabError], str, str]] = {
    "format": (["--format", "htm"], ConfigError, "`--format` has htm, which is no format", "did you mean html?"),
    "no format": (["--format", ","], ConfigError, "`--format` is empty", "terminal, md, html"),
    "out without format": (["--out", "-"], ConfigError, "given: no --format", "--format md --out -"),
    "out with two": (["--out", "-", "--format", "md,csv"], ConfigError, "given: --format md,csv", "--out DIR"),
    "out with a page": (["--out", "-", "--format", "html"], ConfigError, "given: --format html", "--out DIR"),
    "out with json flag and md": (
        *(["--out", "-", "--json", "--format", "md"], ConfigError),
        *("given: --json", "--out DIR"),
    ),
    "empty baseline": (["--baseline", " "], ConfigError, "`--baseline` is empty", "--baseline norm=layernorm"),
    "a file": (["file"], RunError, "file is no run, sweep, folder or bundle", "lmlab runs ls"),
    "no config": (["runs/gone-00000008"], RunError, "runs/gone-00000008 has no config.yaml", "lmlab runs ls"),
    "out is a file": (["--format", "md", "--out", "file"], RunError, "can't write to file: File exists", "--out DIR"),
    "out can't be made": (["--format", "md", "--out", "file/x"], RunError, "Not a directory", "--out DIR"),
    "file can't be written": (["--format", "md", "--out", "taken"], RunError, "taken/report.md: Is a dir", "--out DIR"),
    "bundle": (["--bundle", "out.tar"], ConfigError, "`--bundle` is out.tar", "--bundle out.zip"),
    "bundle nowhere": (["--json", "--bundle", "no/x.zip"], RunError, "can't write no/x.zip", "another file"),
    "key": (["norm=rmsnorm"], ConfigError, "`norm=rmsnorm` is no run, sweep", "--baseline key=value"),
    "run": (["nosuch"], RunError, "no run nosuch in runs", "the runs there: a-00000001"),
    "folder": (["empty"], RunError, "there are no runs in empty", "lmlab train"),
    "no runs": (["paths.runs=nowhere"], RunError, "there are no runs in nowhere", "paths.runs=FOLDER"),
    "baseline": (["--baseline", "pos=t5"], RunError, "is no arm and no run", "the arms: norm=rmsnorm, norm=layernorm"),
    "two arms": (["--baseline", "pos=rope"], RunError, "fits several arms", "name one of them by more words"),
    "unreadable": (["bad"], RunError, "x-00000009 can't be read: config.yaml holds no mapping", "lmlab runs ls"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_two_lines(root: Path, tmp_path: Path, case: str) -> None:
    words, kind, message, hint = REFUSED[case]
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    made.run(root, "gone-00000008").path.joinpath("config.yaml").unlink()
    (tmp_path / "taken" / "report.md").mkdir(parents=True)
    made.run(tmp_path / "bad", "x-00000009").path.joinpath("config.yaml").write_text("[]")
    with pytest.raises(kind) as caught:
        call(*words)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert len(str(caught.value).splitlines()) == 2
    assert caught.value.exit_code != 0


# ---------------------------------------------------------------- around it


def test_report_imports_no_torch_and_no_hydra(root: Path) -> None:
    code = "import sys; from lmlab.cli.app import run; s = run(sys.argv[1:]); m = sys.modules; "
    code += "print(s, 'torch' in m, 'hydra' in m, 'wandb' in m, 'matplotlib' in m, file=sys.stderr)"
    words = [sys.executable, "-c", code, "report", "--format", "terminal,md,csv,json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=root.parent, env=dict(os.environ))
    assert done.stderr.splitlines()[-1] == "0 False False False False"


@pytest.mark.parametrize("words", ["--format terminal", "--json", "--format csv --out -"])
def test_a_reader_that_went_away_is_no_traceback(root: Path, words: str) -> None:
    line = [sys.executable, "-m", "lmlab", "report", *words.split()]
    pipe = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root.parent)
    assert pipe.stdout is not None
    assert pipe.stderr is not None
    pipe.stdout.close()
    assert pipe.stderr.read() == ""
    assert pipe.wait() == 141


COMPLETED = {
    "lmlab repo": ["report"],
    "lmlab report a": ["a-00000001", "a-00000002"],
    "lmlab report a-00000001 n": ["norm-aaaa0001"],
    "lmlab report --base": ["--baseline"],
    "lmlab report --format m": ["md"],
}


@pytest.mark.parametrize("line", COMPLETED)
def test_completion_offers_runs_and_sweeps(root: Path, line: str) -> None:
    swept(root)
    *before, current = split(line)
    assert sorted(candidates(before[1:], current)) == COMPLETED[line]
