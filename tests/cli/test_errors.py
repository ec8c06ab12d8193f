"""Wrong command lines: two lines on stderr, nothing on stdout, the right exit status, no traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmlab.cli import app
from lmlab.errors import Errors, LmlabError, RunError, TrainingFailed

WRONG = {
    "trian": ("`trian` is not a command of lmlab", "did you mean `lmlab train`?"),
    "zzz": ("`zzz` is not a command of lmlab", "commands: train, sweep, eval"),
    "norm=rmsnorm": ("`norm=rmsnorm` is not a command of lmlab", "did you mean `lmlab train norm=rmsnorm`?"),
    "runs lss": ("`lss` is not a command of lmlab runs", "did you mean `lmlab runs ls`?"),
    "train --norm=rmsnorm": ("`--norm=rmsnorm` is not a flag", "write norm=rmsnorm, without dashes"),
    "train --n-layers 3": ("`--n-layers` is not a flag", "write model.n_layers=…, without dashes"),
    "train --resum x": ("`--resum` is not a flag of `lmlab train`", "did you mean --resume?"),
    "generate R --prompt x --max-tokens 24": ("`--max-tokens` is not a flag of `lmlab generate`", "mean --max-new?"),
    "generate R --prompt x --tokens 24": ("`--tokens` is not a flag of `lmlab generate`", "did you mean --max-new?"),
    "generate R --prompt x --temprature 1": ("is not a flag of `lmlab generate`", "did you mean --temperature?"),
    "generate R --prompt x --device cpu": ("`--device` is not a flag", "write device=…, without dashes"),
    "generate R --prompt x --norm=dyt": (
        "is not a flag of `lmlab generate`",
        "`lmlab generate --help` lists the flags",
    ),
    "eval R --foo 9": ("`--foo` is not a flag of `lmlab eval`", "`lmlab eval --help` lists the flags"),
    "train --max-tokens 24": ("`--max-tokens` is not a flag", "write train.max_tokens=…, without dashes"),
    "new attn x --norm=dyt": ("is not a flag of `lmlab new`", "`lmlab new --help` lists the flags"),
    "train --zzz": ("`--zzz` is not a flag of `lmlab train`", "`lmlab train --help` lists the flags"),
    "train --stop-at soon": ("invalid value for '--stop-at'", "`lmlab train --help` shows how it is used"),
    "train --stop-at": ("option '--stop-at' requires an argument", "lmlab train --help"),
    "verify": ("missing argument 'RUN", "`lmlab verify --help` shows how it is used"),
    "train norm=rmsnrm": ("`norm=rmsnrm` is not known; choices:", "did you mean norm=rmsnorm?"),
    "train n_layers=3": ("`n_layers` is not known", "did you mean model.n_layers=3?"),
    "train attn=gqa attn.n_kv_heads=3": ("which does not divide `model.n_heads` 4", "use one of 1, 2, 4"),
    "options nrm": ("`nrm` is no group, option or key", "did you mean `lmlab options norm`?"),
    "options norm attn": ("`lmlab options` takes one name", "lmlab options norm"),
    "new nrm x": ("there is no template for a part of `nrm`", "did you mean `lmlab new norm x`?"),
    "completion tcsh": ("there is no completion for tcsh", "bash, zsh, fish"),
}


@pytest.mark.parametrize(("line", "message", "hint"), [(k, *v) for k, v in WRONG.items()], ids=list(WRONG))
def test_two_lines_and_status_2(line: str, message: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("error: ")
    assert second.startswith("hint: ")
    assert message in first
    assert hint in second


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail() -> Any:
        raise error

    monkeypatch.setattr(app, "make_app", lambda: lambda **_: fail())


STATUS = [
    (LmlabError("x", "y"), 2, "error: x\nhint: y\n"),
    (RunError("x"), 2, "error: x\n"),
    (TrainingFailed("x", "y"), 1, "error: x\nhint: y\n"),
    (Errors([LmlabError("a", "b"), TrainingFailed("c")]), 2, "error: a\nhint: b\nerror: c\n"),
    (KeyboardInterrupt(), 130, ""),
    (ValueError("no\nway"), 1, "error: unexpected ValueError: no\nhint: this is a bug"),
    (SystemExit(143), 143, ""),
]


@pytest.mark.parametrize(("error", "status", "text"), STATUS, ids=lambda v: type(v).__name__)
def test_the_status_of_an_error(
    error: BaseException, status: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, error)
    try:
        got = app.run(["train"])
    except SystemExit as left:
        got = int(left.code or 0)
    assert got == status
    err = capsys.readouterr().err
    assert err.startswith(text) if text else err == ""
    assert "Traceback" not in err


def test_debug_shows_the_traceback_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, LmlabError("x"))
    assert app.run(["train", "--debug", "norm=a"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("error: x\n")


def lmlab(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "lmlab", *words], env=os.environ | env, capture_output=True, text=True)


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("train", "--help"), ("runs", "--help")], ids=" ".join)
def test_help(words: tuple[str, ...]) -> None:
    done = lmlab(*words)
    assert done.returncode == 0
    assert "Usage: lmlab" in done.stdout
    assert done.stderr == ""


def test_version() -> None:
    from lmlab import __version__

    assert lmlab("--version").stdout == f"lmlab {__version__}\n"


def test_a_reader_that_leaves_is_no_error() -> None:
    """`lmlab options | head -1`: the rest can't be written, and nothing is said about it."""
    command = f"{sys.executable} -m lmlab options; echo status $? >&2"
    done = subprocess.run(["bash", "-c", f"({command}) | head -1 >/dev/null"], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert "error" not in done.stderr
    assert done.stderr.strip() in ("status 0", "status 141")


@pytest.mark.parametrize(("env", "coloured"), [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False)])
def test_colour_only_on_a_terminal_and_without_no_color(env: dict[str, str], coloured: bool) -> None:
    import pty

    clean = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | env
    outer, inner = pty.openpty()
    subprocess.run([sys.executable, "-m", "lmlab", "trian"], env=clean, stderr=inner, stdout=subprocess.DEVNULL)
    text = os.read(outer, 4096).decode()
    os.close(outer), os.close(inner)
    assert ("\033[" in text) == coloured
    assert "\033[" not in lmlab("trian", TERM="xterm").stderr


LIGHT = """
import sys
sys.argv = ["lmlab", *{words!r}]
from lmlab.__main__ import main
try:
    main()
finally:
    heavy = ("torch", "hydra", "omegaconf", "numpy", "datasets", "wandb")
    print([m for m in heavy if m in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    "words", [["--help"], ["train", "--help"], ["options"], ["options", "attn"], ["trian"]], ids=str
)
def test_help_options_and_usage_errors_import_nothing_heavy(words: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT.format(words=words)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stderr.splitlines()[-1] == "[]", done.stderr


def test_the_flags_that_completion_offers_are_those_that_there_are() -> None:
    import typer

    from lmlab.cli.commands import EVERYWHERE, Command, commands

    def flags(command: Any) -> set[str]:
        return {o for p in command.params for o in p.opts if o.startswith("--")}

    def compare(offered: Command, real: Any, name: str) -> None:
        sub = getattr(real, "commands", {})
        assert set(offered.subcommands) == set(sub), name
        if not sub:
            assert set(offered.flags) - set(EVERYWHERE) == flags(real) - {"--help"}, name
        for label, inner in offered.subcommands.items():
            compare(inner, sub[label], f"{name} {label}")

    real = typer.main.get_command(app.make_app())
    assert set(real.commands) == set(commands()) != set()  # type: ignore[attr-defined]
    for name, offered in commands().items():
        compare(offered, real.commands[name], name)  # type: ignore[attr-defined]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is of Linux")
@pytest.mark.parametrize("line", ["options", "options norm", "--help", "runs ls --json"])
def test_output_that_can_not_be_written_is_a_two_line_error(tmp_path: Path, line: str) -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "lmlab", *line.split()]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=dict(os.environ))
    assert done.returncode == 1
    error = f"error: can't write the output: {os.strerror(errno.ENOSPC)}\nhint: see where stdout is sent\n"
    assert done.stderr == error


@pytest.mark.parametrize("line", ["options", "runs ls --json"])
def test_a_reader_that_went_away_is_no_traceback(tmp_path: Path, line: str) -> None:
    words = [sys.executable, "-m", "lmlab", *line.split()]
    pipe = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert pipe.stdout is not None
    assert pipe.stderr is not None
    pipe.stdout.close()
    assert pipe.stderr.read() == ""
    assert pipe.wait() != 0
