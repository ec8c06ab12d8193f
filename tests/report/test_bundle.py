"""A bundle gives the same report elsewhere, holds the small files only, and can't write outside its folder."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lmlab.errors import RunError
from lmlab.report.build import build
from lmlab.report.bundle import pack
from lmlab.report.plain import as_json
from lmlab.report.sources import opened
from tests.report import made


def reported(root: Path, *words: str, bundle: Path | None = None, baseline: str | None = None) -> dict[str, Any]:
    with opened(words, root) as selection:
        report = build(selection, made.outside, baseline=baseline)
        if bundle is not None:
            pack(bundle, selection, report)
    found: dict[str, Any] = json.loads(as_json(report))
    return {key: value for key, value in found.items() if key not in ("source", "made")}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A sweep with a planned member, a damaged run, a plug-in, evaluations, and a large checkpoint."""
    root = tmp_path / "here" / "runs"
    first = made.run(root, "a-00000001", started="2026-01-01")
    (first.path / "checkpoints" / "step-00000100").mkdir(parents=True)
    (first.path / "checkpoints" / "step-00000100" / "model.safetensors").write_bytes(b"weights")
    for folder in ("tokenizer", "wandb", "eval"):
        (first.path / folder).mkdir()
        (first.path / folder / "x.json").write_text("{}")
    first.append_log("a line")
    first.save_plugins({"mine.py": "x = 1"})
    damaged = made.run(root, "b-00000002", "norm=layernorm", started="2026-01-02")
    damaged.metrics_path.write_text("nonsense\n" + damaged.metrics_path.read_text())
    made.run(root, "c-00000003", "pos=alibi", started="2026-01-03")
    for name, file in (("d-00000004", "manifest.json"), ("e-00000005", "config.yaml")):
        (made.run(root, name, started="2026-01-04").path / file).write_text("[")
    arms = {"ln": ["norm=layernorm"], "rms": [], "gqa": ["attn=gqa"]}
    members = [("a-00000001", "rms", 0), ("b-00000002", "ln", 0), ("never-99999999", "gqa", 0)]
    made.sweep(root, "s-aaaa0001", arms, members, baseline="rms")
    return root


def there(tmp_path: Path, bundle: Path) -> Path:
    """The bundle, on another machine: nothing of the runs is left."""
    shutil.rmtree(tmp_path / "here")
    elsewhere = tmp_path / "there"
    elsewhere.mkdir()
    return Path(shutil.move(bundle, elsewhere / "moved.zip"))


WORDS: dict[str, tuple[list[str], str | None, int]] = {
    "a sweep": ([], None, 3),
    "a mixture": (["s", "c"], None, 4),
    "a baseline": (["{root}"], "pos=alibi", 4),  # and one that is in no arm
}


@pytest.mark.parametrize("case", WORDS)
def test_a_bundle_gives_the_same_report_elsewhere(root: Path, tmp_path: Path, case: str) -> None:
    words, baseline, n_runs = WORDS[case]
    bundle = tmp_path / "out.zip"
    then = reported(root, *(word.format(root=root) for word in words), bundle=bundle, baseline=baseline)
    now = reported(tmp_path / "nowhere", str(there(tmp_path, bundle)))
    assert now == then
    assert len(then["runs"]) == n_runs


def test_a_bundle_can_be_bundled_again(root: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "1.zip", tmp_path / "2.zip"
    then = reported(root, bundle=first)
    reported(tmp_path, str(first), bundle=second)
    assert reported(tmp_path, str(second)) == then


def test_a_typed_baseline_goes_before_the_bundles(root: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "out.zip"
    reported(root, bundle=bundle)
    assert reported(tmp_path, str(bundle), baseline="norm=layernorm")["baseline"] == 0


def test_a_bundle_holds_the_small_files_only(root: Path, tmp_path: Path) -> None:
    reported(root, "a", bundle=tmp_path / "out.zip")
    assert sorted(zipfile.ZipFile(tmp_path / "out.zip").namelist()) == [
        "bundle.json",
        "runs/a-00000001/config.yaml",
        "runs/a-00000001/eval/x.json",
        "runs/a-00000001/log.txt",
        "runs/a-00000001/manifest.json",
        "runs/a-00000001/metrics.jsonl",
        "runs/a-00000001/plugins/mine.py",
    ]


def test_a_sweeps_plan_and_ledger_are_in(root: Path, tmp_path: Path) -> None:
    reported(root, bundle=tmp_path / "out.zip")
    names = zipfile.ZipFile(tmp_path / "out.zip").namelist()
    assert {"runs/sweeps/s-aaaa0001/sweep.json", "runs/sweeps/s-aaaa0001/ledger.jsonl"} <= set(names)


def test_runs_of_one_name_from_two_folders_are_both_in(root: Path, tmp_path: Path) -> None:
    made.run(tmp_path / "other", "a-00000001", "optim.lr=0.01", started="2026-01-04")
    words = [str(root / "a-00000001"), str(tmp_path / "other" / "a-00000001")]
    then = reported(root, *words, bundle=tmp_path / "out.zip")
    assert [run["run"] for run in then["runs"]] == ["a-00000001", "a-00000001"]
    assert reported(tmp_path, str(tmp_path / "out.zip")) == then


def test_a_running_run_is_still_told_as_running(root: Path, tmp_path: Path) -> None:
    """Nobody holds its claim where the bundle is read; what was so when it was made counts."""
    run = made.run(root, "r-00000009", state="running")
    with run.claim():
        then = reported(root, "r-00000009", bundle=tmp_path / "out.zip")
    assert then["runs"][0]["state"] == "running"
    assert reported(tmp_path, str(tmp_path / "out.zip")) == then


# ---------------------------------------------------------------- wrong files


@pytest.mark.parametrize("name", ["../out.txt", "/etc/out.txt", "runs/../../out.txt", "..\\out.txt", "C:\\out.txt"])
def test_a_path_that_leads_outside_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "evil.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("bundle.json", json.dumps({"title": "x"}))
        archive.writestr(name, "x")
    with pytest.raises(RunError, match="which leads outside"):
        reported(tmp_path, str(path))


def test_a_table_that_leads_outside_is_refused(tmp_path: Path) -> None:
    made.run(tmp_path, "secret-00000001")
    path = tmp_path / "evil.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("bundle.json", json.dumps({"title": "x", "runs": [str(tmp_path / "secret-00000001")]}))
    with pytest.raises(RunError, match="which leads outside"):
        reported(tmp_path, str(path))


def test_copies_and_strays_are_told_of_elsewhere_too(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "a-00000001", root / "copy")
    (root / "f-00000006").mkdir()
    then = reported(root, str(root), bundle=tmp_path / "out.zip")
    assert {"copy is a copy of a-00000001: counted once", "f-00000006 is empty: it has no config.yaml"} <= set(
        then["notes"]
    )
    assert reported(tmp_path, str(there(tmp_path, tmp_path / "out.zip"))) == then


def test_a_run_without_its_manifest_is_told_of_elsewhere_too(root: Path, tmp_path: Path) -> None:
    run = made.run(root, "g-00000007", "attn=gqa")
    (run.path / ".claim").touch()
    (run.path / "manifest.json").unlink()
    then = reported(root, str(root), bundle=tmp_path / "out.zip")
    assert "g-00000007: manifest.json is missing" in then["notes"]
    assert reported(tmp_path, str(there(tmp_path, tmp_path / "out.zip"))) == then


def test_other_files_are_not_unpacked(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.zip"
    reported(root, "a", bundle=path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("runs/a-00000001/evil.sh", "x")
    with opened([str(path)], tmp_path) as selection:
        folder = selection.runs[0].path
        assert (folder / "config.yaml").is_file()
        assert not (folder / "evil.sh").exists()
    assert not folder.exists()


BAD = {
    "no zip": (b"hello", "can't be read"),
    "empty": (b"", "can't be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_zip_is_refused(tmp_path: Path, case: str) -> None:
    content, message = BAD[case]
    (tmp_path / "x.zip").write_bytes(content)
    with pytest.raises(RunError, match=message):
        reported(tmp_path, str(tmp_path / "x.zip"))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (None, "is not a bundle: it has no bundle.json"),
        ("{", "bundle.json can't be read"),
        ('{"title": "x", "runs": 3}', "bundle.json can't be read"),
        ('{"title": "x", "version": 99}', "has version 99; this lmlab reads up to 1"),
        ('{"title": "x", "more": 1}', "bundle.json can't be read"),
    ],
)
def test_a_bundle_of_another_kind_is_refused(tmp_path: Path, table: str | None, message: str) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("readme", "x")
        if table is not None:
            archive.writestr("bundle.json", table)
    with pytest.raises(RunError, match=message):
        reported(tmp_path, str(tmp_path / "x.zip"))


def test_a_damaged_bundle_is_refused(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.zip"
    reported(root, bundle=path)
    content = bytearray(path.read_bytes())
    content[200:260] = bytes(60)
    path.write_bytes(bytes(content))
    with pytest.raises(RunError, match="can't be read"):
        reported(tmp_path, str(path))


@pytest.mark.parametrize("at", [30, 60, 90, 200, 400])
def test_a_bundle_of_which_a_member_does_not_unpack_is_refused(root: Path, tmp_path: Path, at: int) -> None:
    """A few bytes inside the largest member: the zip's table is whole, what zlib makes of it is not."""
    path = tmp_path / "out.zip"
    reported(root, bundle=path)
    with zipfile.ZipFile(path) as archive:
        info = max(archive.infolist(), key=lambda one: one.compress_size)
    content = bytearray(path.read_bytes())
    start = info.header_offset + 30 + len(info.filename) + at
    content[start : start + 8] = b"\xff" * 8
    path.write_bytes(bytes(content))
    with pytest.raises(RunError) as caught:
        reported(tmp_path, str(path))
    assert caught.value.message.startswith(f"{path} can't be read: ")
    assert caught.value.hint == "it is damaged: make the bundle again"


def test_an_unwritable_bundle_leaves_nothing_behind(root: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="can't write"):
        reported(root, bundle=tmp_path / "no" / "folder" / "out.zip")
    (tmp_path / "taken.zip").mkdir()
    with pytest.raises(RunError, match="can't write"):
        reported(root, bundle=tmp_path / "taken.zip")
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []
