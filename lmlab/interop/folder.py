"""The weights of a Hugging Face folder: which files hold which tensors. No pickle is ever opened.

Names are made whole here: a folder of the bare model leaves the prefix out (`wte.weight`), some heads have two names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
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
        """fp32. Raises RunError for a tensor that is damaged or holds no floating-point numbers."""
        file, own = self.places[name]
        try:
            found: Tensor = self._handle(file).get_tensor(own)
        except Exception as error:
            raise RunError(f"`{own}` in {file} can't be read: {error}", AGAIN) from error
        if not found.is_floating_point():
            kind = str(found.dtype).removeprefix("torch.")
            raise RunError(
                f"`{own}` in {file.name} is {kind}: quantised weights", "import the model that was quantised"
            )
        self.dtypes.add(str(found.dtype).removeprefix("torch."))
        return found.to(torch.float32)

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
    """Every tensor's place. Raises RunError: no safetensors, a missing shard, a damaged file."""
    places: dict[str, tuple[Path, str]] = {}
    for file in files(folder):
        with opened(file) as content:
            places |= {name: (file, name) for name in content.keys()}  # noqa: SIM118  # no dict
    return Weights(folder, dict(_whole_names(places, family)))


def _whole_names(places: dict[str, tuple[Path, str]], family: Family) -> Iterator[tuple[str, tuple[Path, str]]]:
    bare = not any(name.startswith(family.prefix) for name in places)
    for name, place in places.items():
        head, _, leaf = name.partition(".")
        if head in ("lm_head", family.head):
            yield f"{family.head}.{leaf}", place
        else:
            yield (f"{family.prefix}{name}" if bare else name), place


def files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that the index names."""
    if (folder / INDEX).is_file():
        return _shards(folder)
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
    if pickles:
        raise RunError(
            f"{folder} has its weights as {listed(pickles, 3)} only: such files can run code, and are never opened",
            f"where you trust it, load it and save_pretrained it, which writes {WHOLE}",
        )
    raise RunError(f"{folder} has no {WHOLE} and no {INDEX}", "give a folder that save_pretrained wrote")


def _shards(folder: Path) -> list[Path]:
    file = folder / INDEX
    try:
        names = sorted(set(json.loads(file.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{file} can't be read: {error}", AGAIN) from error
    if odd := [n for n in names if not isinstance(n, str) or Path(n).name != n]:
        raise RunError(f"{file} names {odd[0]}, which is no file of the folder", AGAIN)
    if missing := [n for n in names if not (folder / n).is_file()]:
        raise RunError(f"{folder} lacks {listed(missing)}, which its index names", AGAIN)
    return [folder / n for n in names]


def skipped(name: str, family: Family) -> bool:
    """A buffer that some versions of transformers saved: masks, frequencies."""
    return any(re.fullmatch(pattern, name) for pattern in family.skipped)
