"""Your own files: found, read byte for byte, and every fault told with its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lmlab.data.files import TextFiles
from lmlab.data.spec import TextFiles as Spec
from lmlab.errors import DataError


def texts(*files: object, field: str = "text") -> list[str]:
    corpus = TextFiles(Spec(files=[str(f) for f in files], field=field))
    return [text for path in corpus.files for text in _read(path, field)]


def _read(path: Path, field: str) -> list[str]:
    from lmlab.data.files import READERS

    return list(READERS[path.suffix](path, field))


def jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    return path


def parquet(path: Path, **columns: list) -> Path:
    import pyarrow
    from pyarrow import parquet as pq

    pq.write_table(pyarrow.table(columns), path)
    return path


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """t/a.txt, t/b.txt, t/deep/er/c.txt, t/deep/d.jsonl, t/README.md"""
    root = tmp_path / "t"
    (root / "deep/er").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/er/c.txt"):
        (root / name).write_text(Path(name).stem)
    jsonl(root / "deep/d.jsonl", {"text": "d1"}, {"text": "d2"})
    (root / "README.md").write_text("no text of the corpus")
    return root


FOUND = {
    "one file": (["a.txt"], ["a"]),
    "glob": (["*.txt"], ["a", "b"]),
    "recursive glob": (["**/*.txt"], ["a", "b", "c"]),
    "folder": (["."], ["a", "b", "d1", "d2", "c"]),
    "no doubles": (["*.txt", "a.txt", "."], ["a", "b", "d1", "d2", "c"]),
    "order of the list does not matter": (["b.txt", "a.txt"], ["a", "b"]),
}


@pytest.mark.parametrize("case", FOUND)
def test_files_are_found(tree: Path, case: str) -> None:
    patterns, expected = FOUND[case]
    assert texts(*(tree / p for p in patterns)) == expected


def test_home_and_relative_names(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tree))
    assert texts("~/*.txt") == ["a", "b"]
    monkeypatch.chdir(tree)
    assert texts("deep/**/*.txt") == ["c"]


def test_a_name_with_glob_letters_is_a_name_first(tmp_path: Path) -> None:
    (tmp_path / "data[1].txt").write_text("x")
    assert texts(tmp_path / "data[1].txt") == ["x"]


def test_text_is_read_byte_for_byte(tmp_path: Path) -> None:
    raw = "\ufeffa\r\nb\rc\n\x00é\n\n".encode()
    (tmp_path / "a.txt").write_bytes(raw)
    assert texts(tmp_path / "a.txt")[0].encode() == raw


def test_records(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one\\nline", "n": 1}\r\n\n  \n{"text": "\\u00e9"}')
    assert texts(tmp_path / "a.jsonl") == ["one\nline", "é"]
    parquet(tmp_path / "b.parquet", body=["x", "y"] * 300, n=[1, 2] * 300)
    assert texts(tmp_path / "b.parquet", field="body") == ["x", "y"] * 300


def test_the_fingerprint_is_of_content_and_order_alone(tree: Path, tmp_path: Path) -> None:
    def fingerprint(root: Path) -> str:
        return TextFiles(Spec(files=[str(root)])).fingerprint()

    before = fingerprint(tree)
    moved = tree.rename(tmp_path / "elsewhere")
    assert fingerprint(moved) == before
    (moved / "a.txt").write_text("A")
    assert fingerprint(moved) != before


def latin1(p: Path) -> Path:
    (p / "a.txt").write_bytes(b"abc\n" + "é".encode("latin1") + b"x")
    return p / "a.txt"


def latin1_jsonl(p: Path) -> Path:
    (p / "a.jsonl").write_bytes(b'{"text": "ab"}\n{"text": "\xe9"}\n')
    return p / "a.jsonl"


def empty(p: Path) -> Path:
    (p / "a.txt").touch()
    return p / "a.txt"


def blank_jsonl(p: Path) -> Path:
    (p / "a.jsonl").write_text("\n \n")
    return p / "a.jsonl"


def unknown(p: Path) -> Path:
    (p / "a.md").write_text("x")
    return p / "a.md"


def folder_without(p: Path) -> Path:
    (p / "f").mkdir()
    (p / "f/a.md").write_text("x")
    return p / "f"


def misspelt(p: Path) -> Path:
    (p / "shakespeare.txt").write_text("x")
    return p / "shakespear.txt"


def not_parquet(p: Path) -> Path:
    (p / "a.parquet").write_bytes(b"PAR1 no PAR1")
    return p / "a.parquet"


WRONG: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "nothing matches": (lambda p: p / "*.txt", "`{}` matches no file", "relative names start at"),
    "misspelt": (misspelt, "`{}` matches no file", "shakespeare.txt?"),
    "folder without": (folder_without, "`{}` matches no file", "it has no .txt, .jsonl, .parquet file"),
    "unknown extension": (unknown, "no reader for {} (extension `.md`; known: .txt, .jsonl, .parquet)", "convert it"),
    "empty": (empty, "{} is empty", "remove it"),
    "blank jsonl": (blank_jsonl, "{} is empty", "remove it"),
    "not UTF-8": (latin1, "{} is not UTF-8: byte 0xe9 at offset 4", "iconv"),
    "jsonl not UTF-8": (latin1_jsonl, "{} is not UTF-8: byte 0xe9 at offset 25", "iconv"),
    "invalid JSON": (
        lambda p: (p / "a.jsonl").write_text('{"text": "a"}\n{"text": \n') and p / "a.jsonl",  # type: ignore[dict-item]
        "{}:2: invalid JSON",
        "one JSON object a line",
    ),
    "not an object": (lambda p: jsonl(p / "a.jsonl", ["x"]), "{}:1: the record is a list", "one JSON object a line"),
    "missing field": (
        lambda p: jsonl(p / "a.jsonl", {"text": "a"}, {"body": "b", "id": 1}),
        "{}:2: no field `text` (`data.field`); fields there: body, id",
        "set data.field to one of these",
    ),
    "near field": (
        lambda p: jsonl(p / "a.jsonl", {"texts": "a", "id": 1}),
        "fields there: texts, id",
        "data.field=texts",
    ),
    "not text": (lambda p: jsonl(p / "a.jsonl", {"text": 3}), "{}:1: field `text` is int, not text", "field of text"),
    "null": (lambda p: jsonl(p / "a.jsonl", {"text": None}), "{}:1: field `text` is null, not text", "drop the record"),
    "surrogate": (
        lambda p: (p / "a.jsonl").write_text('{"text": "\\ud800"}') and p / "a.jsonl",  # type: ignore[dict-item]
        "{}:1: field `text` holds the lone surrogate '\\ud800'",
        "drop the record",
    ),
    "parquet field": (lambda p: parquet(p / "a.parquet", body=["x"]), "{}: no field `text`", "data.field=body"),
    "parquet type": (
        lambda p: parquet(p / "a.parquet", text=[1]),
        "{}, record 1: field `text` is int",
        "field of text",
    ),
    "parquet empty": (lambda p: parquet(p / "a.parquet", text=[]), "{} is empty", "remove it"),
    "not parquet": (not_parquet, "{} is not a readable parquet file", "write it again"),
}


@pytest.mark.parametrize("case", WRONG)
def test_faults_are_told_with_their_place(tmp_path: Path, case: str) -> None:
    make, message, hint = WRONG[case]
    path = make(tmp_path)
    with pytest.raises(DataError) as caught:
        texts(path if isinstance(path, Path) else tmp_path / "a.jsonl")
    assert message.format(path) in caught.value.message
    assert hint in caught.value.hint
    assert str(caught.value).count("\n") == 1


def test_no_files_named() -> None:
    with pytest.raises(DataError, match=r"`data.files` is empty"):
        texts()
