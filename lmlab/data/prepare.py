"""From a corpus and a tokenizer to token files in the cache: done once, found by content afterwards.

    <cache>/data/<key>/{train,val,test}.bin, info.json, tokenizer/        key = hash of corpus, split and tokenizer
    <cache>/tokenizers/<key>/{tokenizer.json,lmlab.json}

A folder is made beside its name and renamed when it is whole, under a lock that ends with its process: of two that
start together the second waits and finds the result; what a killed one left is removed by the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmlab.data.corpora import SPLITS, Corpus
from lmlab.data.spec import DataSpec
from lmlab.data.tokenizer import Tokenizer, check_lossless
from lmlab.data.tokens import TokenFile, TokenWriter, damaged, writing
from lmlab.errors import DataError
from lmlab.registry import Spec, make

if TYPE_CHECKING:
    from lmlab.data.source import Batches, Place
    from lmlab.data.tasks.source import TaskSource

FORMAT = 1
BATCH_CHARS, CHARS_PER_TOKEN = 1 << 22, 4
SAY_EVERY_S = 0.1
NOT_CONTENT = frozenset({"packing", "streaming", "files"})  # of a data spec; files count by their content
Progress = Callable[[str, "float | None"], None]


@dataclass(frozen=True)
class Prepared:
    """A corpus as ids. `fingerprint` is of the ids and the tokenizer: the same everywhere. `info` is for a manifest."""

    tokenizer: Tokenizer
    train: TokenFile
    val: TokenFile
    test: TokenFile
    fingerprint: str
    tokenizer_hash: str
    info: dict[str, Any]

    @property
    def lossless(self) -> bool:
        return self.tokenizer.lossless

    @property
    def lossy_why(self) -> str:
        return self.tokenizer.lossy_why

    @property
    def corpora(self) -> list[Prepared]:
        return [self]

    @property
    def tasks(self) -> dict[str, TaskSource]:
        return {}

    def batches(self, *, rows: int, seq_len: int, seed: int, packing: str) -> Batches:
        from lmlab.data.batches import TrainBatches  # here: what only plans a run needs no torch

        start = self.tokenizer.start
        return TrainBatches(self.train, rows=rows, seq_len=seq_len, seed=seed, packing=packing, start=start)

    def epochs(self, n_tokens: int) -> float:
        return n_tokens / self.train.n_tokens

    def said(self) -> str:
        return f"{self.train.n_tokens:,} tokens"


def cache_dir(paths_cache: str | None = None) -> Path:
    """`paths.cache`, else $LMLAB_CACHE, else ~/.cache/lmlab."""
    chosen = paths_cache or os.environ.get("LMLAB_CACHE") or "~/.cache/lmlab"
    return Path(chosen).expanduser().absolute()


def prepare(
    data: DataSpec,
    tokenizer: Spec,
    cache: Path,
    *,
    progress: Progress | None = None,
    force: bool = False,
    trained: Tokenizer | None = None,
) -> Prepared:
    """The token files of `data` under `tokenizer`, from the cache or made now.

    progress(what, share done or None) is called now and then. force: make it again, whatever the cache holds.
    trained: use this tokenizer (a run's own, on any data) in place of the one `tokenizer` would give.
    Raises DataError: no such data, damaged cache, disk full, an empty split.
    """
    say = progress or (lambda what, share: None)
    corpus: Corpus = make(data)
    corpus_key = digest(FORMAT, data.name, corpus.fingerprint(), _content_fields(data))
    if trained is None:
        key = digest(corpus_key, tokenizer.name, tokenizer_key(tokenizer))
    else:
        key = digest(corpus_key, "trained", trained.hash)
    folder = cache / "data" / key
    if folder.is_dir() and not force:
        with contextlib.suppress(DataError):  # it may just be replaced by `--force`: looked at again under the lock
            if _begun_rightly(found := open_prepared(folder)):
                return found
    with locked(folder, say):
        if force or not folder.is_dir() or not _begun_rightly(open_prepared(folder)):
            made = trained or _tokenizer(tokenizer, corpus, cache / "tokenizers" / key, say, force, limit=_limit(data))
            with building(folder) as beside:
                _write(corpus, data, made, beside, say)
        return open_prepared(folder)


def corpus(data: DataSpec, tokenizer: Spec, place: Place) -> Prepared:
    """What `lmlab/data/source.py` opens corpora with."""
    return prepare(data, tokenizer, place.cache, progress=place.progress, force=place.force, trained=place.trained)


def digest(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def tokenizer_key(spec: Spec) -> Any:
    """What decides a tokenizer besides the corpus: its fields; of a local tokenizer.json the content, not the place."""
    if spec.name != "hf":
        return dataclasses.asdict(spec)
    from lmlab.data import hub

    return hub.tokenizer_key(getattr(spec, "path", None), getattr(spec, "revision", None))


def _content_fields(data: DataSpec) -> dict[str, Any]:
    return {k: v for k, v in dataclasses.asdict(data).items() if k not in NOT_CONTENT}


def open_prepared(folder: Path) -> Prepared:
    """What `prepare` left in `folder`, checked. Raises DataError naming the damaged file and the remedy."""
    try:
        info = json.loads((folder / "info.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise damaged(folder / "info.json", str(e)) from e
    tokenizer = Tokenizer.load(folder / "tokenizer")
    files = {split: TokenFile.open(folder / f"{split}.bin") for split in SPLITS}
    fingerprint = _fingerprint(files, tokenizer)
    if fingerprint != info.get("fingerprint"):
        raise damaged(folder / "info.json", "token files and tokenizer are not the ones it describes")
    return Prepared(tokenizer, **files, fingerprint=fingerprint, tokenizer_hash=tokenizer.hash, info=info)


def _begun_rightly(found: Prepared) -> bool:
    """Not so where an older lmlab put end-of-text before documents whose tokenizer has a start token of its own."""
    return int(found.train.tokens[0]) == found.tokenizer.start


def _fingerprint(files: dict[str, TokenFile], tokenizer: Tokenizer) -> str:
    return digest([files[split].content_hash for split in SPLITS], tokenizer.hash)


@contextlib.contextmanager
def locked(folder: Path, say: Progress) -> Iterator[None]:
    """The lock of `folder`, held by one process; the operating system drops it when that ends, however it ends."""
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = (folder.parent / f".{folder.name}.lock").open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that prepares the same data", None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def building(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder` that takes its name when the block ends normally. Call it under the lock."""
    for leftover in folder.parent.glob(f".{folder.name}.tmp*"):
        shutil.rmtree(leftover, ignore_errors=True)
    beside, old = (folder.with_name(f".{folder.name}.tmp-{what}") for what in ("new", "old"))
    try:
        with writing(folder):
            beside.mkdir()
        yield beside
        with writing(folder):
            if folder.exists():
                folder.rename(old)
            beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _limit(data: DataSpec) -> int | None:
    limit: int | None = getattr(data, "max_tokens", None)
    return limit


def _train_texts(corpus: Corpus, limit: int | None) -> Iterator[str]:
    """The train split; with `data.max_tokens` about as much of it as that many tokens hold."""
    n_chars = 0
    for split, text in corpus.documents():
        if split == "train":
            yield text
            n_chars += len(text)
            if limit and n_chars >= limit * CHARS_PER_TOKEN:
                return


def _tokenizer(spec: Spec, corpus: Corpus, folder: Path, say: Progress, force: bool, *, limit: int | None) -> Tokenizer:
    if folder.is_dir() and not force:
        with contextlib.suppress(DataError):  # a damaged one is made again
            return Tokenizer.load(folder)
    say(f"tokenizer {spec.name}", None)
    found: Tokenizer = make(spec, _train_texts(corpus, limit))
    asked = getattr(spec, "vocab_size", found.vocab_size)
    if found.vocab_size < asked:
        say(f"the train split gives {found.vocab_size} ids, `tokenizer.vocab_size` asked for {asked}", None)
    if found.kind != "byte":
        with writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
        with building(folder) as beside, writing(folder):
            found.save(beside)
    return found


def _write(corpus: Corpus, data: DataSpec, tokenizer: Tokenizer, folder: Path, say: Progress) -> None:
    """Token files, tokenizer and info.json into `folder`."""
    header: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "start": tokenizer.start,
        "tokenizer_hash": tokenizer.hash,
    }
    limit = _limit(data)
    with contextlib.ExitStack() as stack:
        writers = {s: stack.enter_context(TokenWriter(folder / f"{s}.bin", **header)) for s in SPLITS}
        _fill(writers, corpus, tokenizer, limit, say)
        for split, writer in writers.items():
            if writer.n_tokens < 2:
                raise _empty(split, data, sum(w.n_tokens for w in writers.values()))
    files = {split: TokenFile.open(folder / f"{split}.bin") for split in SPLITS}
    with writing(folder):
        tokenizer.save(folder / "tokenizer")
        (folder / "info.json").write_text(json.dumps(_info(corpus, tokenizer, files), indent=1), encoding="utf-8")


def _fill(
    writers: dict[str, TokenWriter], corpus: Corpus, tokenizer: Tokenizer, limit: int | None, say: Progress
) -> None:
    """All documents into their writers, or until train has exactly `limit` tokens."""
    total, done, n_seen, due = corpus.n_bytes(), 0, 0, 0.0
    for split, text, ids in _encoded(corpus.documents(), tokenizer):
        writer, n_bytes = writers[split], len(text.encode())
        if tokenizer.kind == "hf" and tokenizer.lossless:
            check_lossless(tokenizer, text, ids, decode=n_seen < 100 or n_seen % 100 == 0)
        if limit and split == "train" and len(ids) > limit - writer.n_tokens - 1:
            ids = ids[: limit - writer.n_tokens - 1]
            n_bytes = int(tokenizer.token_bytes[ids].sum())
        writer.add(np.asarray(ids, dtype=np.int64), n_bytes)
        done, n_seen = done + n_bytes, n_seen + 1
        if time.monotonic() > due:
            say("tokens", min(1.0, done / total) if total else None)
            due = time.monotonic() + SAY_EVERY_S
        if limit and writers["train"].n_tokens >= limit:
            return


def _encoded(documents: Iterable[tuple[str, str]], tokenizer: Tokenizer) -> Iterator[tuple[str, str, list[int]]]:
    """(split, text, ids), encoded some megabytes at a time so that all threads have work."""

    def flush() -> Iterator[tuple[str, str, list[int]]]:
        ids = tokenizer.encode_batch([text for _, text in held])
        yield from ((split, text, i) for (split, text), i in zip(held, ids, strict=True))
        held.clear()

    held: list[tuple[str, str]] = []
    n_chars = 0
    for split, text in documents:
        held.append((split, text))
        n_chars += len(text)
        if n_chars >= BATCH_CHARS:
            yield from flush()
            n_chars = 0
    yield from flush()


def _info(corpus: Corpus, tokenizer: Tokenizer, files: dict[str, TokenFile]) -> dict[str, Any]:
    splits = {
        split: {
            "documents": file.n_docs,
            "bytes": file.raw_bytes,
            "tokens": file.n_tokens,
            "bytes_per_token": round(file.raw_bytes / file.n_tokens, 4),
        }
        for split, file in files.items()
    }
    about = {"name": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "hash": tokenizer.hash}
    about.update(lossless=tokenizer.lossless, lossy_why=tokenizer.lossy_why)
    return {**corpus.info(), "tokenizer": about, "splits": splits, "fingerprint": _fingerprint(files, tokenizer)}


def _empty(split: str, data: DataSpec, n_tokens: int) -> DataError:
    shares = {k: getattr(data, k, None) for k in ("val_frac", "test_frac", "max_tokens")}
    said = "".join(f", `data.{k}` {v}" for k, v in shares.items() if v is not None)
    return DataError(
        f"the split `{split}` of `data={data.name}` would be empty ({n_tokens:,} tokens in all{said})",
        f"bring more text or more documents, or raise data.{split}_frac" if split != "train" else "bring more text",
    )
