from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmlab.errors import RunError, TrainingFailed
from lmlab.runs import checkpoint
from lmlab.runs.checkpoint import content_hash, latest_good, load, save

CONFIG = {"version": 1, "norm": {"name": "rmsnorm", "eps": 1e-06}}


def model(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(8, 4, generator=g),
        "half": torch.randn(3, 5, generator=g).bfloat16(),
        "double": torch.randn(2, generator=g, dtype=torch.float64),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
    }


def state(step: int) -> dict[str, Any]:
    moments = {"w": {"exp_avg": torch.full((3,), step / 7), "step": torch.tensor(float(step))}}
    return {"counters": {"step": step, "best_loss": float("inf"), "best_step": None}, "optimizer": moments}


def put(run: Path, step: int, *, keep_last: int = 2, best_step: int | None = None) -> Path:
    return save(run, step, model(step), state(step), config=CONFIG, keep_last=keep_last, best_step=best_step)


def names(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def test_reads_back_bit_for_bit(tmp_path: Path) -> None:
    found = load(put(tmp_path, 100))
    assert names(tmp_path) == ["step-00000100"]
    assert same(found.model, model(100))
    assert found.state["counters"] == {"step": 100, "best_loss": float("inf"), "best_step": None}
    assert torch.equal(found.state["optimizer"]["w"]["exp_avg"], torch.full((3,), 100 / 7))
    assert (found.step, found.config, found.content_hash) == (100, CONFIG, content_hash(model(100)))


# ---------------------------------------------------------------- content hash


def test_content_hash_sees_names_dtypes_shapes_and_bytes() -> None:
    base = {"a": torch.zeros(4), "b": torch.ones(2)}
    others = [
        {"c": torch.zeros(4), "b": torch.ones(2)},
        {"a": torch.zeros(2, 2), "b": torch.ones(2)},
        {"a": torch.zeros(4, dtype=torch.int32), "b": torch.ones(2)},
        {"a": torch.tensor([0.0, 0, 0, -0.0]), "b": torch.ones(2)},
        {"a": torch.zeros(4)},
    ]
    assert len({content_hash(m) for m in [base, *others]}) == 6
    assert content_hash(dict(reversed(base.items()))) == content_hash(base)


def test_content_hash_ignores_memory_layout() -> None:
    t = torch.arange(6.0).reshape(2, 3)
    big = torch.zeros(4, 6)
    big[:2, ::2] = t
    assert content_hash({"a": t.t().contiguous().t()}) == content_hash({"a": t}) == content_hash({"a": big[:2, ::2]})


def test_content_hash_is_stable() -> None:
    """blake2b-128 of b"n|int64|[]|" + bytes + b"w|float32|[1, 2]|" + bytes: hashes of old runs must stay comparable."""
    assert content_hash({"w": torch.tensor([[1.0, 2.0]]), "n": torch.tensor(3)}) == "a4cc70f4881664eb8d327b8c61ccda62"


def test_hashing_25_mb_is_quick() -> None:
    weights = {"w": torch.zeros(25 * 2**20 // 4)}
    times = []
    for _ in range(5):
        started = time.perf_counter()
        content_hash(weights)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.1  # about 0.03 s on an idle machine


def test_tied_tensors_are_saved_once_and_come_back_tied(tmp_path: Path) -> None:
    shared = torch.randn(64, 8)
    tied = {"head.weight": shared, "embed.weight": shared, "view": shared[:2]}
    path = save(tmp_path, 1, tied, {}, config={}, keep_last=1)
    assert (path / "model.safetensors").stat().st_size < 64 * 8 * 4 + 1000
    found = load(path)
    assert same(found.model, tied)
    assert found.model["head.weight"] is found.model["embed.weight"]
    assert found.content_hash == content_hash(tied)


# ---------------------------------------------------------------- what is kept


def test_last_k_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        put(tmp_path, step, keep_last=2, best_step=20)
    assert names(tmp_path) == ["step-00000020", "step-00000040", "step-00000050"]
    put(tmp_path, 60, keep_last=1, best_step=60)
    assert names(tmp_path) == ["step-00000060"]


def test_checkpoints_of_an_abandoned_future_go(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        put(tmp_path, step, keep_last=3)
    put(tmp_path, 15, keep_last=2)
    assert names(tmp_path) == ["step-00000010", "step-00000015"]


def test_same_step_is_replaced(tmp_path: Path) -> None:
    put(tmp_path, 10)
    save(tmp_path, 10, model(99), state(10), config=CONFIG, keep_last=2)
    assert names(tmp_path) == ["step-00000010"]
    assert same(load(tmp_path / "checkpoints/step-00000010").model, model(99))


@pytest.mark.parametrize("bad", [{"a": {1, 2}}, {"a": [object()]}, {"a": Path("x")}, {(1,): torch.nn.Linear(1, 1)}])
def test_state_that_could_not_be_read_back_is_refused(tmp_path: Path, bad: dict[Any, Any]) -> None:
    with pytest.raises(TypeError, match="state"):
        save(tmp_path, 1, model(), bad, config={}, keep_last=1)
    assert not (tmp_path / "checkpoints").exists()


# ---------------------------------------------------------------- damage


def damage_truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["model.safetensors", "state.pt", "meta.json"])
@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, Path.unlink], ids=["truncated", "flipped", "missing"])
def test_damage_names_file_and_remedy_and_the_one_before_is_used(tmp_path: Path, file: str, damage: Any) -> None:
    put(tmp_path, 10)
    path = put(tmp_path, 20)
    damage(path / file)
    with pytest.raises(RunError, match=rf"step-00000020/{file}") as caught:
        load(path)
    assert "go on from the checkpoint before it" in caught.value.hint
    said: list[str] = []
    found = latest_good(tmp_path, said.append)
    assert found is not None
    assert found.step == 10
    assert len(said) == 1
    assert file in said[0]


def test_edited_meta_is_refused(tmp_path: Path) -> None:
    path = put(tmp_path, 10)
    text = (path / "meta.json").read_text()
    (path / "meta.json").write_text(text.replace('"step": 10', '"step": 11'))
    with pytest.raises(RunError, match="content changed"):
        load(path)


def test_other_version_is_refused(tmp_path: Path) -> None:
    path = put(tmp_path, 10)
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | {"version": 99}))
    with pytest.raises(RunError, match="format version 99, this lmlab reads 1"):
        load(path)


def test_weights_swapped_with_their_hashes_are_found_by_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path, 10)
    monkeypatch.setattr(checkpoint, "verify_file", lambda *_: None)
    damage_flip(path / "model.safetensors")
    with pytest.raises(RunError, match="content hash differs"):
        load(path)


def test_no_code_runs_from_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, 10)
    monkeypatch.setattr(checkpoint, "verify_file", lambda *_: None)
    torch.save({"x": pytest.raises}, path / "state.pt")
    with pytest.raises(RunError, match="can't be read"):
        load(path)


def test_all_damaged_and_none_at_all(tmp_path: Path) -> None:
    assert latest_good(tmp_path) is None
    (put(tmp_path, 10) / "state.pt").unlink()
    with pytest.raises(RunError, match=r"every checkpoint of .* is damaged"):
        latest_good(tmp_path)


# ---------------------------------------------------------------- killed and full

KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_checkpoint import put
from lmlab.runs import checkpoint
real_rename, real_rmtree, n = os.rename, checkpoint.shutil.rmtree, int(sys.argv[2])
def rename(a, b):
    global n
    n -= 1
    if n < 0: os._exit(9)
    real_rename(a, b)
def prune(*_): os._exit(9)
os.rename = rename
if sys.argv[3] == "prune": checkpoint._prune = prune
put(Path(sys.argv[1]), int(sys.argv[4]), keep_last=1)
"""


def killed(run: Path, *, after_renames: int, step: int, at: str = "rename") -> None:
    code = KILLED.format(tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code, str(run), str(after_renames), at, str(step)], check=False)
    assert done.returncode == 9


def test_killed_before_the_rename_keeps_the_previous(tmp_path: Path) -> None:
    put(tmp_path, 10)
    killed(tmp_path, after_renames=0, step=20)
    assert [n for n in names(tmp_path) if not n.startswith(".")] == ["step-00000010"]
    found = latest_good(tmp_path)
    assert found is not None
    assert found.step == 10
    put(tmp_path, 20)
    assert names(tmp_path) == ["step-00000010", "step-00000020"]


def test_killed_after_the_rename_has_both(tmp_path: Path) -> None:
    put(tmp_path, 10)
    killed(tmp_path, after_renames=9, step=20, at="prune")
    found = latest_good(tmp_path)
    assert found is not None
    assert found.step == 20
    put(tmp_path, 30, keep_last=1)
    assert names(tmp_path) == ["step-00000030"]


def test_killed_while_replacing_the_same_step_loses_nothing(tmp_path: Path) -> None:
    put(tmp_path, 10, keep_last=1)
    killed(tmp_path, after_renames=1, step=10)
    found = latest_good(tmp_path)
    assert found is not None
    assert same(found.model, model(10))
    put(tmp_path, 20)
    assert names(tmp_path) == ["step-00000010", "step-00000020"]


def test_killed_while_pruning_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 10)
    real = checkpoint.shutil.rmtree

    def half(path: Path, ignore_errors: bool = False) -> None:
        if Path(path).name.endswith("dropped"):
            (Path(path) / "state.pt").unlink()
            raise KeyboardInterrupt
        real(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(checkpoint.shutil, "rmtree", half)
    with pytest.raises(KeyboardInterrupt):
        put(tmp_path, 20, keep_last=1)
    monkeypatch.undo()
    found = latest_good(tmp_path)
    assert found is not None
    assert found.step == 20
    put(tmp_path, 30, keep_last=1)
    assert names(tmp_path) == ["step-00000030"]


def full(_: Any, *__: Any, **___: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["save_file", "torch.save", "atomic_write", "os.fsync"])
def test_full_disk_keeps_the_previous_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    put(tmp_path, 10)
    monkeypatch.setattr(f"lmlab.runs.checkpoint.{where}", full)
    with pytest.raises(TrainingFailed, match=r"the disk is full: could not write checkpoint .*step-00000020") as caught:
        put(tmp_path, 20)
    monkeypatch.undo()
    assert "the checkpoints before it are untouched" in caught.value.hint
    assert names(tmp_path) == ["step-00000010"]
    assert load(tmp_path / "checkpoints/step-00000010").step == 10


@pytest.mark.parametrize("limit", [100, 20_000, 120_000, 300_000])
def test_real_refusal_of_the_kernel_is_a_full_disk(tmp_path: Path, limit: int) -> None:
    """RLIMIT_FSIZE stops writes as a full disk does, inside safetensors and torch.save too."""
    big = {"w": torch.zeros(30_000)}
    save(tmp_path, 10, big, {"m": torch.zeros(90_000)}, config={}, keep_last=2)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        with pytest.raises(TrainingFailed, match="the disk is full"):
            save(tmp_path, 20, big, {"m": torch.zeros(90_000)}, config={}, keep_last=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert names(tmp_path) == ["step-00000010"]
    assert load(tmp_path / "checkpoints/step-00000010").step == 10


def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(RunError, match="could not write checkpoint"):
        put(tmp_path, 10)
