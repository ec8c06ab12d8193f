"""Token files: what is written comes back, and nothing damaged, foreign or half-written does."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import numpy as np
import pytest
from data_cases import in_child, write

from lmlab.data import tokens
from lmlab.data.tokens import HEADER_BYTES, TokenFile, dtype_for
from lmlab.errors import DataError

DOCS = [np.array([5, 6, 7]), np.array([8]), np.array([9, 9])]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(257, "uint16"), (65_536, "uint16"), (65_537, "uint32"), (70_000, "uint32")]
)
def test_dtype_follows_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    assert dtype_for(vocab_size) == dtype
    file = write(tmp_path / "train.bin", [np.array([vocab_size - 1])], vocab_size=vocab_size)
    assert file.tokens.tolist() == [0, vocab_size - 1]
    assert file.tokens.dtype == dtype


def test_each_document_is_preceded_by_one_end_of_text(tmp_path: Path) -> None:
    file = write(tmp_path / "train.bin", DOCS)
    assert file.tokens.tolist() == [0, 5, 6, 7, 0, 8, 0, 9, 9]
    assert file.doc_starts.tolist() == [0, 4, 6]
    assert (file.n_tokens, file.n_docs, file.raw_bytes, file.vocab_size) == (9, 3, 6, 300)


@pytest.mark.parametrize("bad", [300, -1, 70_000])
def test_ids_outside_the_vocabulary_are_refused_at_write(tmp_path: Path, bad: int) -> None:
    with pytest.raises(DataError, match=f"id {bad} is outside the vocabulary of 300 ids"):
        write(tmp_path / "train.bin", [np.array([1, bad, 2])])
    assert list(tmp_path.iterdir()) == []


def test_ids_outside_the_vocabulary_are_refused_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = tokens._header

    def narrower(writer: tokens.TokenWriter, content_hash: str) -> bytes:
        writer.vocab_size = 8
        return original(writer, content_hash)

    monkeypatch.setattr(tokens, "_header", narrower)
    with pytest.raises(DataError, match="id 9 is outside its vocabulary of 8 ids"):
        write(tmp_path / "train.bin", DOCS)


def damage_cut(raw: bytes) -> bytes:
    return raw[:-3]


def damage_longer(raw: bytes) -> bytes:
    return raw + b"x"


def damage_header_only(raw: bytes) -> bytes:
    return raw[:100]


def damage_empty(raw: bytes) -> bytes:
    return b""


def damage_header_bit(raw: bytes) -> bytes:
    return raw[:60] + bytes([raw[60] ^ 1]) + raw[61:]


def damage_token(raw: bytes) -> bytes:
    return raw[: HEADER_BYTES + 2] + b"\x01" + raw[HEADER_BYTES + 3 :]


def damage_document_start(raw: bytes) -> bytes:
    return raw[:-8] + b"\x01" + raw[-7:]


def damage_zeros(raw: bytes) -> bytes:
    return bytes(len(raw))


def damage_version(raw: bytes) -> bytes:
    return raw[:8] + b"\x09" + raw[9:]


DAMAGES = [f for name, f in list(globals().items()) if name.startswith("damage_")]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__.removeprefix("damage_"))
def test_damage_is_told_with_file_and_remedy(tmp_path: Path, damage) -> None:
    path = tmp_path / "val.bin"
    write(path, DOCS)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        TokenFile.open(path)
    assert str(path) in caught.value.message
    assert "lmlab data prepare --force" in caught.value.hint


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        TokenFile.open(tmp_path / "train.bin")


def test_the_content_hash_is_of_content_alone(tmp_path: Path) -> None:
    one, same = write(tmp_path / "a.bin", DOCS), write(tmp_path / "b.bin", DOCS)
    assert one.content_hash == same.content_hash
    assert (
        write(tmp_path / "c.bin", [np.concatenate([DOCS[0], [0], DOCS[1]]), DOCS[2]]).content_hash != one.content_hash
    )


def test_large_files_are_verified_in_full_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "ALWAYS_VERIFIED_BYTES", 0)
    path = tmp_path / "train.bin"
    write(path, DOCS)
    assert path.with_name("train.bin.verified").exists()
    time = path.stat().st_mtime_ns
    path.write_bytes(damage_token(path.read_bytes()))
    os.utime(path, ns=(time, time))
    TokenFile.open(path)  # same size and time: believed
    os.utime(path, ns=(time, time + 1))
    with pytest.raises(DataError, match="differs from its checksum"):
        TokenFile.open(path)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    def fill() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        try:
            write(tmp_path / "train.bin", [np.ones(10_000, dtype=int)])
        except DataError as e:
            return str(e)
        return "written"

    status, said = in_child(fill)
    assert (status, said.splitlines()[0]) == (0, f"error: can't write `{tmp_path}/train.bin`: File too large")
    assert said.splitlines()[1].startswith("hint: free some space")
    assert list(tmp_path.iterdir()) == []


def test_no_space_at_the_last_moment_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left on device"):
        write(tmp_path / "train.bin", DOCS)
    assert list(tmp_path.iterdir()) == []
