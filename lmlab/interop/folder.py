"""The weights of a Hugging Face folder: which files hold which tensors. No pickle is ever opened.

Names are made whole here: a folder of the bare model leaves the prefix out (`wte.weight`), some heads have two names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from lmlab.errors import RunError, listed
from lmlab.interop.family import Family

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack")
READ = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
AGAIN = "bring the file back from where the model came from"


@dataclass
class Weights:
    """The tensors of a folder by whole name, unread: (file, name in it)."""

    folder: Path
    places: dict[str, tuple[Path, str]]
    dtypes: set[str] = field(default_factory=set)
    _open: dict[Path, Any] = field(default_factory=dict)
    _files: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()
        self._open.clear()

    def shape(self, name: str) -> tuple[int, ...]:
        file, own = self.places[name]
        return tuple(self._handle(file).get_slice(own).get_shape())

    def tensor(self, name: str) -> Tensor:
        """fp32. Raises RunError for a tensor that is damaged, quantised, or holds what is no number."""
        file, own = self.places[name]
        try:
            found: Tensor = self._handle(file).get_tensor(own)
        except Exception as error:
            raise RunError(f"`{own}` in {file} can't be read: {error}", AGAIN) from error
        if found.dtype not in READ:
            kind = str(found.dtype).removeprefix("torch.")
            raise RunError(
                f"`{own}` in {file.name} is {kind}: quantised weights", "import the model that was quantised"
            )
        self.dtypes.add(str(found.dtype).removeprefix("torch."))
        wide = found.to(torch.float32)
        if not wide.isfinite().all():
            raise RunError(f"`{own}` in {file} has values that are NaN or infinite as float32", AGAIN)
        return wide

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = self._files.enter_context(opened(file))
        return self._open[file]


def opened(file: Path) -> Any:
    """A safetensors file. Raises RunError when it is missing, truncated or something else."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError:
        raise RunError(f"{file} is missing", AGAIN) from None
    except Exception as error:  # SafetensorError, OSError
        raise RunError(f"{file} is damaged: {error}", AGAIN) from error


def weights_of(folder: Path, family: Family) -> Weights:
    """Every tensor's place. Raises RunError: no safetensors, a missing shard, a damaged file, a tensor that is there
    twice or that the index alone knows."""
    places: dict[str, tuple[Path, str]] = {}
    for file in files(folder):
        with opened(file) as content:
            for name in content.keys():  # noqa: SIM118  # no dict
                if name in places:
                    raise RunError(f"`{name}` is in {places[name][0].name} and in {file.name} of {folder}", AGAIN)
                places[name] = (file, name)
    if not (folder / WHOLE).is_file():
        _refuse_unkept_index(folder, places, family)
    whole: dict[str, tuple[Path, str]] = {}
    for name, place in _whole_names(places, family):
        if name in whole:
            text = f"{folder} has `{place[1]}` and `{whole[name][1]}`, which are one tensor of {family.cls}"
            raise RunError(text, "take the one out that the model does not use")
        whole[name] = place
    return Weights(folder, whole)


def _refuse_unkept_index(folder: Path, places: Mapping[str, tuple[Path, str]], family: Family) -> None:
    for name, file in _index(folder).items():
        if not skipped(name, family) and places.get(name) != (folder / file, name):
            raise RunError(f"{folder / INDEX} says that `{name}` is in {file}, and it is not", AGAIN)


def _whole_names(places: dict[str, tuple[Path, str]], family: Family) -> Iterator[tuple[str, tuple[Path, str]]]:
    bare = not any(name.startswith(family.prefix) for name in places)
    for name, place in places.items():
        head, _, leaf = name.partition(".")
        if head in ("lm_head", family.head):
            yield f"{family.head}.{leaf}", place
        else:
            yield (f"{family.prefix}{name}" if bare else name), place


def files(folder: Path) -> list[Path]:
    """model.safetensors, else the shards that the index names: transformers' order, where a folder has both."""
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if (folder / INDEX).is_file():
        return [folder / name for name in sorted(set(_index(folder).values()))]
    pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
    if pickles:
        raise RunError(
            f"{folder} has its weights as {listed(pickles, 3)} only: such files can run code, and are never opened",
            f"where you trust it, load it and save_pretrained it, which writes {WHOLE}",
        )
    raise RunError(f"{folder} has no {WHOLE} and no {INDEX}", "give a folder that save_pretrained wrote")


def _index(folder: Path) -> dict[str, str]:
    """Which file holds which tensor; all of the files are there."""
    file = folder / INDEX
    try:
        found = dict(json.loads(file.read_text(encoding="utf-8"))["weight_map"])
        names = sorted(set(found.values()))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{file} can't be read: {error}", AGAIN) from error
    if odd := [n for n in names if not isinstance(n, str) or Path(n).name != n]:
        raise RunError(f"{file} names {odd[0]}, which is no file of the folder", AGAIN)
    if missing := [n for n in names if not (folder / n).is_file()]:
        raise RunError(f"{folder} lacks {listed(missing)}, which its index names", AGAIN)
    return found


def skipped(name: str, family: Family) -> bool:
    """A buffer that some versions of transformers saved: masks, frequencies."""
    return any(re.fullmatch(pattern, name) for pattern in family.skipped)
