"""From an installed wheel, in an empty folder: conf/ is found, a plug-in is written, trained, stopped and resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.conftest import SMALL, write_corpus

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked as pip installs it."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    wheel = next((folder / "dist").glob("*.whl"))
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target"]
    subprocess.run([*install, str(folder / "site"), str(wheel)], check=True, capture_output=True)
    return folder / "site"


def lmlab(site: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(site), "LMLAB_CACHE": str(cwd.parent / "cache")}
    command = [sys.executable, "-m", "lmlab", *words]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_plugin_attention_trains_and_resumes_from_a_wheel(site: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    where = lmlab(site, empty, "--version")
    assert where.stdout.startswith("lmlab "), where.stderr
    assert lmlab(site, empty, "new", "attn", "my_attn").returncode == 0
    assert {p.name for p in empty.iterdir()} == {"my_attn.py", "test_my_attn.py"}
    corpus = write_corpus(tmp_path / "corpus")
    words = [*SMALL, "data=text", f"data.files=['{corpus}']", "data.val_frac=0.2", "data.test_frac=0.2"]
    words += ["plugins=[my_attn.py]", "attn=my_attn", "name=mine"]

    half = lmlab(site, empty, "train", *words, "--stop-at", "10")
    assert half.returncode == 0, half.stderr
    assert half.stdout.startswith("stopped  runs/mine-")
    resumed = lmlab(site, empty, "train", "--resume", "auto")
    assert resumed.returncode == 0, resumed.stderr
    assert "from step 10" in resumed.stderr
    verified = lmlab(site, empty, "verify", "mine")
    assert verified.stdout.startswith("identical: "), verified.stdout + verified.stderr

    forgotten = lmlab(site, empty, "train", "attn=my_attn")
    assert forgotten.returncode == 2
    assert "plugins=[my_attn.py]" in forgotten.stderr
    (empty / "my_attn.py").write_text((empty / "my_attn.py").read_text() + "\nCHANGED = 1\n")
    stale = lmlab(site, empty, "train", *words)
    assert "stale: " in stale.stderr
    scaffold = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_my_attn.py", "-p", "no:cacheprovider"],
        cwd=empty, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert scaffold.returncode == 0, scaffold.stdout


def test_conf_is_in_the_wheel(site: Path) -> None:
    shipped = {p.relative_to(site / "lmlab" / "conf").as_posix() for p in (site / "lmlab" / "conf").rglob("*.yaml")}
    assert shipped == {p.relative_to(ROOT / "conf").as_posix() for p in (ROOT / "conf").rglob("*.yaml")}
