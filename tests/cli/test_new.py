"""`lmlab new`: what it writes works as it stands; it never overwrites."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmlab.cli import app
from lmlab.cli.new import GROUPS


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_template_passes_its_own_test(here: Path) -> None:
    """Causal, deterministic, cached, every parameter trained, configuration read back: in a process of its own."""
    for group in GROUPS:
        assert app.run(["new", group, f"my_{group}"]) == 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "."]
    done = subprocess.run(command, env=os.environ | {"PYTEST_ADDOPTS": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert f"{8 * len(GROUPS)} passed" in done.stdout


def test_what_is_written_is_clean(here: Path) -> None:
    for group in GROUPS:
        app.run(["new", group, f"my_{group}"])
    config = Path(__file__).parents[2] / "pyproject.toml"
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", str(config), "--config", FIRST_PARTY, "."],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout


def test_it_says_what_it_wrote_and_what_to_do_next(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "parts").mkdir()
    assert app.run(["new", "attn", "my_attn", "--dir", "parts"]) == 0
    out, err = capsys.readouterr()
    assert out.split() == ["parts/my_attn.py", "parts/test_my_attn.py"]
    assert "lmlab train plugins=[parts/my_attn.py] attn=my_attn" in err


FIRST_PARTY = "lint.isort.known-first-party=['lmlab']"
WRONG = {
    "attn gqa": "`attn=gqa` is one of lmlab's own",
    "attn llama": "`attn=llama` is one of lmlab's own",
    "norm random": "Python already has a module random",
    "norm MyNorm": "`MyNorm` can't name a part",
    "norm my-norm": "`my-norm` can't name a part",
    "norm class": "`class` can't name a part",
    "norm x --dir nowhere": "`--dir` names nowhere, which is not a folder",
    "optim my_optim": "there is no template for a part of `optim`",
}


@pytest.mark.parametrize(("line", "message"), WRONG.items(), ids=list(WRONG))
def test_what_is_refused(line: str, message: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["new", *line.split()]) == 2
    assert message in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_nothing_is_overwritten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "test_my_norm.py").write_text("mine")
    assert app.run(["new", "norm", "my_norm"]) == 2
    assert "test_my_norm.py is here already" in capsys.readouterr().err
    assert (here / "test_my_norm.py").read_text() == "mine"
    assert not (here / "my_norm.py").exists()
