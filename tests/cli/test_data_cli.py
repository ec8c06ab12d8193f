"""`lmlab data ls` and `lmlab data prepare`, as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from lmlab.cli import data
from lmlab.errors import LmlabError


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    data.register(app)
    app.command("other")(lambda: None)
    return app


@pytest.fixture
def files(tmp_path: Path) -> str:
    (tmp_path / "book.txt").write_text("".join(f"line {i} of a book\n" for i in range(400)))
    return f"data.files=[{tmp_path}/book.txt]"


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return f"paths.cache={tmp_path / 'cache'}"


def run(app: typer.Typer, *words: str) -> Result:
    result = CliRunner().invoke(app, ["data", *words])
    if isinstance(result.exception, LmlabError):
        raise result.exception
    return result


def test_prepare_and_list(app: typer.Typer, files: str, cache: str) -> None:
    made = run(app, "prepare", "data=text", files, "tokenizer=byte", cache, "--json")
    assert made.exit_code == 0, made.output
    info = json.loads(made.stdout)
    assert info["splits"]["train"]["documents"] == 1
    (row,) = json.loads(run(app, "ls", cache, "--json").stdout)["prepared"]
    assert row["fingerprint"] == info["fingerprint"]
    assert row["folder"] == info["folder"]
    assert (row["corpus"], row["tokenizer"], row["vocab_size"]) == ("text", "byte", 257)
    assert row["tokens"] == row["bytes"] + 3
    assert row["disk_bytes"] > 2 * row["tokens"]


def test_tables_for_people(app: typer.Typer, files: str, cache: str) -> None:
    said = run(app, "prepare", "data=text", files, "tokenizer.vocab_size=300", cache)
    assert "text · tokenizer bpe" in said.stdout
    assert "1 documents" in said.stdout
    assert "tokenizer bpe" in said.stderr
    listed = run(app, "ls", cache).stdout
    assert "on disk" in listed
    assert "text" in listed
    for name in ("sotu", "pycode", "hf", "bpe", "byte"):
        assert f"  {name} " in listed


def test_nothing_prepared(app: typer.Typer, cache: str) -> None:
    assert "nothing is prepared" in run(app, "ls", cache).stdout


def test_force_repairs(app: typer.Typer, files: str, cache: str) -> None:
    words = ("prepare", "data=text", files, "tokenizer=byte", cache, "--json")
    info = json.loads(run(app, *words).stdout)
    Path(info["folder"], "val.bin").write_bytes(b"damaged")
    with pytest.raises(LmlabError, match="is not a token file"):
        run(app, *words)
    assert json.loads(run(app, *words, "--force").stdout)["fingerprint"] == info["fingerprint"]


def test_a_damaged_folder_is_listed(app: typer.Typer, files: str, cache: str) -> None:
    info = json.loads(run(app, "prepare", "data=text", files, "tokenizer=byte", cache, "--json").stdout)
    Path(info["folder"], "info.json").write_text("{")
    assert json.loads(run(app, "ls", cache, "--json").stdout)["prepared"][0]["corpus"] == "damaged"
    assert "damaged" in run(app, "ls", cache).stdout


WRONG = {
    "unknown key of ls": (("ls", "x=3"), "takes no `x=3`", "paths.cache=DIR"),
    "no such file": (("prepare", "data=text", "data.files=[nowhere.txt]"), "`nowhere.txt` matches no file", "start at"),
    "no network": (("prepare", "data=hf", "data.repo=owner/name", "tokenizer=byte"), "can't be reached", "data=sotu"),
}


@pytest.mark.parametrize("case", WRONG)
def test_faults_are_told(app: typer.Typer, cache: str, case: str) -> None:
    words, message, hint = WRONG[case]
    with pytest.raises(LmlabError) as caught:
        run(app, *words, *([cache] if words[0] == "prepare" else []))
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_ls_and_preparing_need_no_torch() -> None:
    imports = "import sys, lmlab.cli.data, lmlab.data.prepare, lmlab.data.hub"
    code = f"{imports}; assert not {{'torch', 'datasets'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
