"""TAB: what can follow at the cursor, through bash on a real terminal, and by the protocol of zsh and fish."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmlab.cli.complete import candidates, split
from lmlab.cli.completion import SCRIPTS
from lmlab.config.catalogue import entries

BIN = Path(sys.executable).parent


def complete(line: str, shell: str = "zsh", point: int | None = None, cwd: Path | None = None) -> list[str]:
    env = os.environ | {"COMP_LINE": line, "COMP_POINT": "" if point is None else str(point)}
    command = [sys.executable, "-m", "lmlab", "_complete", shell]
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


CASES = {
    "lmlab tr": ["train"],
    "lmlab --v": ["--version"],
    "lmlab runs s": ["show"],
    "lmlab train --re": ["--resume", "--reuse-stale"],
    "lmlab train --resume a": ["auto"],
    "lmlab train no": ["norm="],
    "lmlab train attn": ["attn.", "attn="],
    "lmlab train trai": ["train."],
    "lmlab train train.max_s": ["train.max_steps="],
    "lmlab train norm=rm": ["norm=rmsnorm"],
    "lmlab train attn.n_": ["attn.n_kv_heads="],
    "lmlab train attn=gqa attn.n_": ["attn.n_kv_heads="],
    "lmlab train attn=mha attn.n_": [],
    "lmlab train attn=gpt2 attn.w": ["attn.weights=", "attn.window="],
    "lmlab train pos=rope,al": ["pos=rope,alibi"],
    "lmlab train pos=rope,": [f"pos=rope,{name}" for name in sorted(set(entries("pos")) - {"rope"})],
    "lmlab train norm=rmsnorm nor": [],
    "lmlab train pos.pair": ["pos.pairing="],
    "lmlab train pos.pairing=h": ["pos.pairing=half"],
    "lmlab train compile=": ["compile=auto", "compile=false", "compile=true"],
    "lmlab train norm.bias=": ["norm.bias=false", "norm.bias=true"],
    "lmlab train preset=ll": ["preset=llama"],
    "lmlab train 'norm=rm": ["norm=rmsnorm"],
    "lmlab train device=cu": ["device=cuda"],
    "lmlab eval --split t": ["test"],
    "lmlab options at": ["attn"],
    "lmlab new no": ["norm"],
    "lmlab completion f": ["fish"],
    "lmlab imp": ["import"],
    "lmlab exp": ["export"],
    "lmlab import here norm=rm": ["norm=rmsnorm"],
    "lmlab export --t": ["--to"],
    "lmlab export --dtype b": ["bfloat16"],
    "lmlab nonsense x": [],
}


@pytest.mark.parametrize(("line", "expected"), CASES.items(), ids=list(CASES))
def test_candidates(line: str, expected: list[str]) -> None:
    *before, current = split(line)
    assert sorted(candidates(before[1:], current)) == sorted(expected)


def test_bash_gets_what_stands_behind_the_last_equals() -> None:
    assert complete("lmlab train norm=rm", "bash") == ["rmsnorm"]
    assert complete("lmlab train pos=rope,al", "bash") == ["rope,alibi"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_get_whole_words(shell: str) -> None:
    assert complete("lmlab train norm=rm", shell) == ["norm=rmsnorm"]


def test_completion_is_of_the_word_at_the_cursor() -> None:
    assert complete("lmlab train norm=rm attn=mha", point=len("lmlab train norm=rm")) == ["norm=rmsnorm"]


def test_names_and_fields_of_a_plugin_are_read_and_never_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\nPath('ran').touch()\n"
        "@option('attn', 'mine', build='mine:M')\nclass S(AttnSpec):\n    depth: int = setting(1, 'x')\n"
    )
    line = "lmlab train plugins=[mine.py] attn"
    assert complete(f"{line}=min", cwd=tmp_path) == ["attn=mine"]
    assert complete(f"{line}=mine attn.de", cwd=tmp_path) == ["attn.depth="]
    assert complete(f"{line}=mine attn.win", cwd=tmp_path) == ["attn.window="]
    assert complete("lmlab train plugins=", cwd=tmp_path) == ["plugins=[mine.py]"]
    assert not (tmp_path / "ran").exists()


def test_runs_are_completed_by_name(tmp_path: Path) -> None:
    (tmp_path / "runs" / "gqa-1234abcd").mkdir(parents=True)
    (tmp_path / "runs" / "gqa-1234abcd" / "config.yaml").touch()
    assert complete("lmlab eval gq", cwd=tmp_path) == ["gqa-1234abcd"]
    assert complete("lmlab train --resume g", cwd=tmp_path) == ["gqa-1234abcd"]
    assert complete("lmlab train --from g", cwd=tmp_path) == ["gqa-1234abcd"]
    assert complete("lmlab train init.run=g", cwd=tmp_path) == ["init.run=gqa-1234abcd"]
    assert complete("lmlab sweep init.run=x,g", cwd=tmp_path) == ["init.run=x,gqa-1234abcd"]
    assert complete("lmlab export g", cwd=tmp_path) == ["gqa-1234abcd"]
    assert complete("lmlab import ru", cwd=tmp_path) == ["runs/"]


def test_what_only_a_sweep_takes(tmp_path: Path) -> None:
    (tmp_path / "experiments" / "first").mkdir(parents=True)
    (tmp_path / "experiments" / "first" / "sweep.yaml").touch()
    assert complete("lmlab sweep exp", cwd=tmp_path) == ["experiment=first"]
    assert "hydra/launcher=joblib" in complete("lmlab sweep hydra/", cwd=tmp_path)
    assert complete("lmlab sweep norm=rmsnorm,lay", cwd=tmp_path) == ["norm=rmsnorm,layernorm"]
    assert complete("lmlab train exp", cwd=tmp_path) == []


def test_a_command_whose_function_stands_in_another_file(tmp_path: Path) -> None:
    assert complete("lmlab runs up", cwd=tmp_path) == ["upload"]
    assert "--json" in complete("lmlab runs upload --", cwd=tmp_path)


def test_a_broken_line_is_answered_with_nothing() -> None:
    for line in ("lmlab train foo.bar=", "lmlab train =", "lmlab train ..", "lmlab train '", 'lmlab train "norm='):
        complete(line)


def test_a_tab_imports_nothing_heavy_and_is_fast() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); sys.argv = ['lmlab', '_complete', 'bash'];"
        "from lmlab.__main__ import main; main(); spent = time.perf_counter() - t;"
        "heavy = ('torch', 'hydra', 'omegaconf', 'typer', 'rich', 'numpy');"
        "print(spent); print([m for m in heavy if m in sys.modules])"
    )
    env = os.environ | {"COMP_LINE": "lmlab train attn=gqa attn.n_", "COMP_POINT": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    candidate, spent, heavy = done.stdout.splitlines()
    assert candidate == "attn.n_kv_heads="
    assert heavy == "[]"
    assert float(spent) < 0.5  # 0.07 s on an idle machine; the bound leaves room for a busy one


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_is_printed(shell: str) -> None:
    command = [sys.executable, "-m", "lmlab", "completion", shell]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"lmlab _complete {shell}" in done.stdout


@pytest.mark.parametrize(("shell", "check"), [("zsh", "zsh -n"), ("fish", "fish --no-execute")])
def test_the_script_is_valid(shell: str, check: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(SCRIPTS[shell])
    subprocess.run([*check.split(), tmp_path / "script"], check=True)


# ---------------------------------------------------------------- bash on a terminal


class Bash:
    """An interactive bash on a pseudo-terminal with lmlab's completion loaded."""

    def __init__(self, cwd: Path) -> None:
        pid, self.fd = pty.fork()
        if pid == 0:
            os.chdir(cwd)
            os.environ.update(PATH=f"{BIN}:{os.environ['PATH']}", PS1="> ", TERM="dumb", INPUTRC="/dev/null")
            os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
        self.pid = pid
        self.send('eval "$(lmlab completion bash)"; echo rea""dy\r')
        self.until("ready")

    def send(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def until(self, text: str, timeout: float = 15) -> str:
        """What was written until `text` came; fails after the timeout."""
        seen, end = "", time.monotonic() + timeout
        while text not in seen:
            left = end - time.monotonic()
            assert left > 0, f"waited for {text!r}, saw {seen!r}"
            if select.select([self.fd], [], [], left)[0]:
                seen += os.read(self.fd, 4096).decode(errors="replace")
        return seen

    def close(self) -> None:
        os.write(self.fd, b"\x15exit\r")
        os.close(self.fd)
        os.waitpid(self.pid, 0)


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bash]:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    shell = Bash(tmp_path_factory.mktemp("bash"))
    yield shell
    shell.close()


@pytest.mark.parametrize(
    ("typed", "becomes"),
    [
        ("lmlab tra\t", "lmlab train "),
        ("lmlab train norm=rm\t", "lmlab train norm=rmsnorm "),
        ("lmlab train attn.n_\t", "lmlab train attn.n_kv_heads="),
        ("lmlab train pos=rope,al\t", "lmlab train pos=rope,alibi "),
        ("lmlab train bloc\tpre\t", "lmlab train block=prenorm "),
        ("lmlab train pos.pairing=i\t", "lmlab train pos.pairing=interleaved "),
    ],
)
def test_tab_in_bash(bash: Bash, typed: str, becomes: str) -> None:
    bash.send("\x15" + typed)  # ^U: from an empty line. (^C would flush what is typed behind it.)
    seen = bash.until(becomes)
    bash.send("|")  # the cursor stands right behind it
    assert (seen + bash.until("|")).endswith(becomes + "|")
