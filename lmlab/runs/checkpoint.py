"""Checkpoints: `checkpoints/step-00000100/` with model.safetensors, state.pt and meta.json.

    .tmp-step-00000100-<pid>/  written and fsynced  ──rename──▶  step-00000100/  ──▶  older ones pruned

A directory with the final name is therefore complete. Whatever a killed writer left has a name that starts with a dot
and goes at the next save. Loading verifies sizes, file hashes and the content hash, and runs no code from the file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmlab.errors import LmlabError, RunError
from lmlab.runs.files import FULL, atomic_write, disk_error, plain, sync_dir, to_json
from lmlab.runs.layout import ASIDE, CHECKPOINTS, checkpoint_path, list_checkpoints
from lmlab.runs.meta import META, MODEL, REMEDY, STATE, VERSION, checksum, file_hash, newest, read_meta, verify_file


@dataclass
class Checkpoint:
    """One verified checkpoint, on the CPU. `model` has every name, tied tensors being one object."""

    step: int
    model: dict[str, Tensor]
    state: dict[str, Any]
    content_hash: str
    config: dict[str, Any]
    path: Path


# ---------------------------------------------------------------- hashing


def content_hash(model_state: Mapping[str, Tensor]) -> str:
    """blake2b over sorted names, dtypes, shapes and bytes; tied tensors enter once, under their first name."""
    digest = hashlib.blake2b(digest_size=16)
    stored, _ = _untie(model_state)
    for name in sorted(stored):
        tensor = stored[name]
        digest.update(f"{name}|{str(tensor.dtype).removeprefix('torch.')}|{list(tensor.shape)}|".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes in row-major order, without a copy where it lies so on the CPU already."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(data)


def _untie(model_state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, and {other name: name it is stored under}. Views that merely overlap are copied."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name in sorted(model_state):
        tensor = model_state[name].detach()
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
        else:
            seen[key] = name
            stored[name] = tensor
    return stored, aliases


# ---------------------------------------------------------------- saving


def save(
    run_path: Path,
    step: int,
    model_state: Mapping[str, Tensor],
    state: dict[str, Any],
    *,
    config: dict[str, Any],
    keep_last: int,
    best_step: int | None = None,
    keep_first: bool = False,
) -> Path:
    """Write `checkpoints/step-<step>`; when it is durable, drop all but it, the last `keep_last` and `best_step`, and
    step 0 if `keep_first`.

    `state` may hold tensors, numbers, strings, None, lists and dicts. An existing checkpoint of this step is replaced;
    later ones, which an earlier life of the run left, are dropped. Raises TrainingFailed when the disk is full,
    RunError when it can't be written; the checkpoints before it are untouched then.
    """
    _require_plain(state, "state")
    folder = Path(run_path) / CHECKPOINTS
    final = checkpoint_path(run_path, step)
    temporary = folder / f".tmp-{final.name}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _recover(folder)
        temporary.mkdir()
        _write(temporary, step, model_state, state, config)
        _publish(temporary, final)
    except LmlabError:
        raise
    except Exception as error:  # torch and safetensors wrap the OSError of a full disk in their own classes
        raise _save_error(error, final) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _prune(folder, step, keep_last, {best_step, *([0] if keep_first else [])})
    return final


def _write(
    folder: Path, step: int, model_state: Mapping[str, Tensor], state: dict[str, Any], config: dict[str, Any]
) -> None:
    stored, aliases = _untie(model_state)
    # safetensors refuses tensors that share a storage; parts of one buffer are copied apart
    alone = {n: t.cpu().contiguous() for n, t in stored.items()}
    save_file({n: t.clone() if _is_part(t) else t for n, t in alone.items()}, folder / MODEL)
    _save_state(state, folder / STATE)
    with ThreadPoolExecutor(2) as pool:  # hashing and waiting for the disk overlap
        content = pool.submit(content_hash, stored)
        hashes = {name: pool.submit(file_hash, folder / name) for name in (MODEL, STATE)}
        for name in hashes:
            with open(folder / name, "rb+") as f:
                os.fsync(f.fileno())
    files = {n: {"bytes": (folder / n).stat().st_size, "blake2b": job.result()} for n, job in hashes.items()}
    meta: dict[str, Any] = {"version": VERSION, "step": step, "content_hash": content.result()}
    meta |= {"aliases": aliases, "files": files, "config": plain(config)}
    atomic_write(folder / META, to_json({**meta, "checksum": checksum(meta)}, indent=1) + "\n")


def _save_state(state: dict[str, Any], path: Path) -> None:
    """torch.save, with the OSError of a failed write, which torch replaces by a puzzling one of its own."""
    with open(path, "wb") as f:
        sink = _Sink(f)
        try:
            torch.save(state, sink)  # type: ignore[arg-type]  # it needs write and flush only
        except Exception as error:
            raise sink.error or error from error


class _Sink:
    """Passes bytes on and remembers what went wrong."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.flush = file, file.flush
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise


def _is_part(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def _publish(temporary: Path, final: Path) -> None:
    """Give a complete directory its final name; one that has it already steps aside and comes back after a kill."""
    sync_dir(temporary)
    aside = final.with_name(ASIDE + final.name)
    if final.exists():
        os.rename(final, aside)
    os.rename(temporary, final)
    sync_dir(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _recover(folder: Path) -> None:
    """Remove what killed writers left; put back a checkpoint that one had moved aside and not yet replaced."""
    for path in folder.iterdir():
        if path.name.startswith(ASIDE) and not (back := folder / path.name.removeprefix(ASIDE)).exists():
            os.rename(path, back)
        elif path.name.startswith((ASIDE, ".tmp-")):
            shutil.rmtree(path, ignore_errors=True)


def _prune(folder: Path, step: int, keep_last: int, also: set[int | None]) -> None:
    steps = {ref.step: ref.path for ref in list_checkpoints(folder.parent)}
    past = sorted(s for s in steps if s <= step)
    keep = {step, *also, *past[-max(1, keep_last) :]}
    for dropped in steps.keys() - keep:
        doomed = folder / f".tmp-{steps[dropped].name}-dropped"
        with suppress(OSError):  # renamed first: a kill in the middle leaves no half checkpoint under a true name
            os.rename(steps[dropped], doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _save_error(error: Exception, final: Path) -> LmlabError:
    full = shutil.disk_usage(final.parent.parent).free < 1 << 20
    if not isinstance(error, OSError):
        wrapped = error.__cause__ or error.__context__
        number = next((n for n in FULL if os.strerror(n) in str(error)), None)
        if isinstance(wrapped, OSError):
            error = wrapped
        elif number is not None or full:
            error = OSError(number or FULL[0], os.strerror(number or FULL[0]))
        else:
            return RunError(f"could not write checkpoint {final}: {error}", "the checkpoints before it are untouched")
    found = disk_error(error, final, "write checkpoint")
    found.hint += "; the checkpoints before it are untouched"
    return found


def _require_plain(value: Any, where: str) -> None:
    """Raises TypeError, naming the place, for what weights_only=True would refuse when the checkpoint is read."""
    if isinstance(value, dict):
        for key, item in value.items():
            _require_plain(key, f"a key of {where}")
            _require_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _require_plain(item, f"{where}[{i}]")
    elif type(value) not in (int, float, str, bool, bytes, type(None), torch.dtype) and not isinstance(value, Tensor):
        raise TypeError(
            f"{where} is a {type(value).__name__}; a checkpoint holds tensors, numbers, strings, lists, dicts"
        )


# ---------------------------------------------------------------- loading


def load(path: Path) -> Checkpoint:
    """Read and verify one checkpoint directory. Raises RunError naming the file that is missing or damaged."""
    path = Path(path)
    meta = read_meta(path)
    for name, facts in meta["files"].items():
        verify_file(path / name, facts)
    try:
        model = load_file(path / MODEL)
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
        model.update({alias: model[name] for alias, name in meta["aliases"].items()})
    except Exception as error:
        raise RunError(f"checkpoint {path} can't be read: {error}", REMEDY) from error
    if content_hash(model) != meta["content_hash"]:
        raise RunError(f"{path / MODEL} does not hold the weights that were saved: content hash differs", REMEDY)
    return Checkpoint(meta["step"], model, state, meta["content_hash"], meta["config"], path)


def latest_good(run_path: Path, note: Callable[[str], None] = lambda _: None) -> Checkpoint | None:
    """The newest undamaged checkpoint, None when there are none. `note` hears of each damaged one passed over.

    Raises RunError when there are checkpoints and all are damaged.
    """
    return newest(run_path, load, note)
