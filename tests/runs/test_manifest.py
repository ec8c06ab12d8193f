from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from lmlab.runs import manifest
from lmlab.runs.files import to_json


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a package in it."""
    package = tmp_path / "repo" / "pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("a = 1\n")
    git(tmp_path / "repo", "init")
    git(tmp_path / "repo", "add", ".")
    git(tmp_path / "repo", "commit", "-m", "first")
    return package


def test_facts_are_complete_and_plain() -> None:
    found = manifest.collect(command=["lmlab", "train"], torch_facts={"threads": 1}, overrides=["norm=rmsnorm"])
    assert json.loads(to_json(found)) == found
    assert found["command"] == ["lmlab", "train"]
    assert found["versions"]["torch"]
    assert found["versions"]["python"].startswith("3.")
    assert found["cpu"]["model"]
    assert found["cpu"]["count"] >= 1
    assert found["torch"] == {"threads": 1}


def test_clean_checkout(checkout: Path) -> None:
    facts = manifest.git(checkout)
    assert len(facts["sha"]) == 40
    assert facts["dirty"] is False
    assert "diff" not in facts


def test_dirty_checkout_records_the_difference(checkout: Path) -> None:
    (checkout / "__init__.py").write_text("a = 2\n")
    (checkout / "new.py").write_text("b = 1\n")
    facts = manifest.git(checkout)
    assert facts["dirty"]
    assert "+a = 2" in facts["diff"]
    assert facts["untracked"] == ["new.py"]
    (checkout / "__init__.py").write_text("a = 3\n")
    assert manifest.git(checkout)["diff_hash"] != facts["diff_hash"]


def test_long_difference_is_cut_but_hashed_whole(checkout: Path) -> None:
    lines = "".join(f"a{i} = {i}\n" for i in range(40000))
    (checkout / "__init__.py").write_text(lines)
    one = manifest.git(checkout)
    (checkout / "__init__.py").write_text(lines + "last = 1\n")
    two = manifest.git(checkout)
    assert len(one["diff"]) <= manifest.MAX_DIFF_BYTES < one["diff_bytes"]
    assert one["diff"][1000:] == two["diff"][1000:]
    assert one["diff_hash"] != two["diff_hash"]


def test_installed_inside_another_repository_is_no_checkout(checkout: Path) -> None:
    installed = checkout.parent / "site-packages" / "lmlab"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert manifest.git(installed) == {}


def test_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert manifest.git() == {}


def test_environment_differences_name_both_values() -> None:
    old = {
        "versions": {"torch": "2.12.0", "numpy": "2.0", "wandb": "1"},
        "torch": {"threads": 2, "matmul_flops_per_s": 1.0, "only_then": True},
        "cpu": {"model": "A"},
        "git": {"sha": "1", "diff": "x" * 1000, "diff_hash": "d"},
        "code_hash": "c1",
        "command": ["a"],
    }
    new = {
        "versions": {"torch": "2.13.0", "numpy": "2.0", "wandb": "2"},
        "torch": {"threads": 1, "matmul_flops_per_s": 2.0},
        "cpu": {"model": "A"},
        "git": {"sha": "1"},
        "code_hash": "c2",
        "command": ["b"],
    }
    assert manifest.environment_differences(old, new) == [
        "code_hash: c1 → c2",
        "versions.torch: 2.12.0 → 2.13.0",
        "torch.threads: 2 → 1",
        "git.diff_hash: d → nothing",
    ]
    assert manifest.environment_differences(old, old) == []
