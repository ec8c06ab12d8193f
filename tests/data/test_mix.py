"""Mixtures: shares, purity, what a row of a part is, and every way to ask for one wrongly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmlab.config.catalogue import entries
from lmlab.config.load import load
from lmlab.config.mixing import parts
from lmlab.data.mix import part_of_rows
from lmlab.data.source import Place, open_source
from lmlab.data.spec import Byte, TaskSpec
from lmlab.data.tokenizer import byte_tokenizer
from lmlab.errors import LmlabError
from lmlab.registry import make

SHAPE = ["model.seq_len=256", "train.batch_tokens=4096"]
ROWS, T = 16, 256


def corpus(folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    for n in range(40):
        (folder / f"{n}.txt").write_text(f"Document {n} says that {n} and {n + 1} make {2 * n + 1}. " * 40)
    return f'data.settings=["text.files:{folder}/*.txt",text.val_frac:0.2,passkey.digits:3,passkey.n_eval:8]'


def mixture(tmp_path: Path, cache_dir: Path, *words: str, mix: str = "[text:0.75,passkey:0.25]") -> Any:
    base = ["data=mix", f"data.mix={mix}", "tokenizer=byte", corpus(tmp_path / "texts"), *SHAPE]
    exp = load([*base, *words]).experiment
    return exp, open_source(exp.data, exp.tokenizer, Place(cache_dir, T, parts=parts(exp.data)))


def batches(source: Any, *, seed: int = 0, packing: str = "stream") -> Any:
    return source.batches(rows=ROWS, seq_len=T, seed=seed, packing=packing)


@pytest.mark.parametrize("shares", [[0.9, 0.1], [0.5, 0.25, 0.25], [0.05, 0.95]], ids=str)
def test_shares_are_kept_within_three_standard_errors(shares: list[float]) -> None:
    drawn = np.concatenate([part_of_rows(shares, 0, k, 16) for k in range(1000)])
    for i, share in enumerate(shares):
        se = math.sqrt(share * (1 - share) / len(drawn))
        assert abs((drawn == i).mean() - share) < 3 * se


def test_the_part_of_a_row_does_not_ask_how_many_rows_there_are() -> None:
    assert np.array_equal(part_of_rows([0.5, 0.5], 3, 7, 8), part_of_rows([0.5, 0.5], 3, 7, 64)[:8])
    assert not np.array_equal(part_of_rows([0.5, 0.5], 3, 7, 64), part_of_rows([0.5, 0.5], 4, 7, 64))


def test_a_batch_is_a_function_of_seed_and_step(tmp_path: Path, cache_dir: Path) -> None:
    _, source = mixture(tmp_path, cache_dir)
    there = [batches(source).batch(k).hash() for k in range(4)]
    again = batches(source)
    assert [again.batch(k).hash() for k in (3, 1, 2, 0)] == [there[k] for k in (3, 1, 2, 0)]
    assert len({*there, batches(source, seed=1).batch(0).hash()}) == 5


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_rows_are_those_of_their_parts(tmp_path: Path, cache_dir: Path, packing: str) -> None:
    """Row r of the corpus is row r of its own batch; a row of the task weighs at its answers alone, from position 0."""
    _, source = mixture(tmp_path, cache_dir)
    batch = batches(source, packing=packing).batch(2)
    of_row = part_of_rows([0.75, 0.25], 0, 2, ROWS)
    assert {*of_row} == {0, 1}
    text = source.first.batches(rows=ROWS, seq_len=T, seed=0, packing=packing).batch(2)
    for name, mine in batch._tensors().items():
        theirs = getattr(text, name)
        for r in np.flatnonzero(of_row == 0) if theirs is not None else ():
            assert torch.equal(mine[r], theirs[r]), name  # type: ignore[index]
    for r in np.flatnonzero(of_row == 1):
        asked = batch.weights_BT[r] > 0
        assert int(asked.sum()) == 3
        answer = source.tokenizer.decode(batch.targets_BT[r][asked].tolist())
        assert f"The pass key is {answer}. Remember it." in source.tokenizer.decode(batch.tokens_BT[r].tolist())
        assert torch.equal(batch.positions_BT[r], torch.arange(T))
        assert batch.documents_BT is None or not batch.documents_BT[r].any()


def test_val_and_test_are_the_first_part(tmp_path: Path, cache_dir: Path) -> None:
    _, source = mixture(tmp_path, cache_dir)
    assert source.val is source.first.val
    assert source.lossless
    assert list(source.tasks) == ["passkey"]
    assert [c.info["corpus"] for c in source.corpora] == ["text"]
    assert source.epochs(1000) == pytest.approx(750 / source.first.train.n_tokens)


def test_the_fingerprint_is_of_parts_shares_and_settings(tmp_path: Path, cache_dir: Path) -> None:
    found = {mixture(tmp_path, cache_dir)[1].fingerprint for _ in range(2)}
    found.add(mixture(tmp_path, cache_dir, mix="[text:0.5,passkey:0.5]")[1].fingerprint)
    assert len(found) == 2


def test_two_corpora_share_the_tokenizer_of_the_first(tmp_path: Path, cache_dir: Path) -> None:
    mix, set_here = "[text:0.9,sotu:0.1]", corpus(tmp_path / "texts").replace(",passkey.digits:3,passkey.n_eval:8", "")
    words = ["data=mix", f"data.mix={mix}", "tokenizer=bpe", "tokenizer.vocab_size=280", set_here, *SHAPE]
    exp = load(words).experiment
    source: Any = open_source(exp.data, exp.tokenizer, Place(cache_dir, T, parts=parts(exp.data)))
    assert {s.tokenizer.hash for s in source.sources} == {source.tokenizer.hash}
    assert source.sources[1].train.vocab_size == source.tokenizer.vocab_size
    assert not source.tasks


REFUSED = {
    "data=mix": ("`data=mix` mixes two parts or more, `data.mix` has 0", "write data.mix=[sotu:0.9,passkey:0.1]"),
    "data=mix data.mix=[sotu:1]": ("`data.mix` has 1", "write data.mix"),
    "data=mix data.mix=[sotu:0.9,passkey]": ("`data.mix` has passkey, which is not PART:SHARE", "write data.mix"),
    "data=mix data.mix=[sotu:0.9,passkey:x]": ("`data.mix` has passkey:x, which is not PART:SHARE", "write data.mix"),
    "data=mix data.mix=[sotu:1.1,passkey:-0.1]": ("`data.mix` has sotu:1.1", "write data.mix"),
    "data=mix data.mix=[sotu:0.9,passkey:0.1] data.settings=[passkey.digits:3,passkey.digits:4]": (
        "`data.settings` sets passkey.digits twice",
        "leave one out",
    ),
    "data=mix data.mix=[sotu:0.5,sotu:0.5]": ("`data.mix` names sotu twice", "add its shares up"),
    "data=mix data.mix=[sotu:0.5,passkey:0.3]": (
        "the shares of `data.mix` sum to 0.8, not to 1",
        "for example data.mix=[sotu:0.625,passkey:0.375]",
    ),
    "data=mix data.mix=[sotu:0.5,paskey:0.5]": ("`data.mix` has paskey", "did you mean passkey?"),
    "data=mix data.mix=[sotu:0.5,mix:0.5]": ("`data.mix` has mix, which is no corpus or task", ""),
    "data=mix data.mix=[passkey:0.5,sotu:0.5]": (
        "`data.mix` begins with passkey, a task",
        "put a corpus first: data.mix=[sotu:0.9,…], or train on it alone: data=passkey",
    ),
    "data=mix data.mix=[sotu:0.5,mqar:0.5]": ("`data.mix` has mqar, whose ids are its own", "use tasks in text: "),
    "data=mix data.mix=[sotu:0.5,passkey:0.5] data.settings=[digits:3]": (
        "`data.settings` has digits:3, which is not PART.FIELD:VALUE",
        "write data.settings=[passkey.digits:3]",
    ),
    "data=mix data.mix=[sotu:0.5,passkey:0.5] data.settings=[mqar.n_pairs:3]": (
        "`data.settings` sets mqar.n_pairs, and `data.mix` has sotu, passkey",
        "leave it out",
    ),
    "data=mix data.mix=[sotu:0.5,passkey:0.5] data.settings=[passkey.digit:3]": (
        "data=passkey has no such field",
        "it has ",
    ),
    "data=mix data.mix=[sotu:0.5,passkey:0.5] data.settings=[passkey.digits:0]": (
        "`data.settings`: passkey.digits is 0, which is not a whole number ≥ 1",
        "`lmlab options passkey`",
    ),
    "data=mix data.mix=[sotu:0.5,passkey:0.5] data.settings=[sotu.packing:documents]": (
        "packing is of the whole mixture",
        "write data.packing=documents",
    ),
    "data=mqar tokenizer=byte": ("`data=mqar` has ids of its own", "leave tokenizer= out, or write tokenizer=ids"),
    "data=mqar tokenizer=bpe": ("`data=mqar` has ids of its own", "tokenizer=ids"),
    "tokenizer=ids": ("`tokenizer=ids` writes no text, and `data=sotu` is text", "data=mqar"),
    "data=passkey tokenizer=ids": ("`tokenizer=ids` writes no text, and `data=passkey` is text", "leave tokenizer="),
    "data=mqar data.packing=documents": ("`data.packing` is documents, which is not rows", "one example"),
    "data=mix data.mix=[sotu:0.5,passkey:0.5] tokenizer=ids": ("`tokenizer=ids` writes no text", "leave tokenizer="),
}


@pytest.mark.parametrize("line", REFUSED)
def test_refused_with_the_remedy(line: str) -> None:
    with pytest.raises(LmlabError) as found:
        load(line.split())
    errors = getattr(found.value, "errors", [found.value])
    assert len(errors) == 1, errors
    message, hint = REFUSED[line]
    assert message in errors[0].message
    assert hint in errors[0].hint


def test_a_bpe_has_nothing_to_be_trained_on_in_a_task_but_one_that_is_trained_spells_it(
    tmp_path: Path, cache_dir: Path
) -> None:
    exp = load(["data=passkey", "tokenizer=bpe"]).experiment
    with pytest.raises(LmlabError) as found:
        open_source(exp.data, exp.tokenizer, Place(cache_dir, 256))
    assert "`tokenizer=bpe` is trained on a corpus, and `data=passkey` has none" in str(found.value)
    assert "mix it: data=mix data.mix=[sotu:0.9,passkey:0.1]" in str(found.value)
    trained = mixture(tmp_path, cache_dir)[1].tokenizer
    source = open_source(exp.data, exp.tokenizer, Place(cache_dir, 256, trained=trained))
    assert source.tokenizer is trained
    assert source.val.n_targets == 5 * 1000


@pytest.mark.parametrize(
    ("line", "tokenizer"),
    [
        ("data=mqar", "ids"),
        ("data=induction preset=gpt2", "ids"),
        ("data=passkey", "byte"),
        ("data=passkey tokenizer=gpt2", "hf"),
        ("tokenizer=byte data=passkey", "byte"),
        ("data=mix data.mix=[sotu:0.9,passkey:0.1]", "bpe"),
        ("data=sotu", "bpe"),
    ],
)
def test_a_task_chooses_its_tokenizer_and_what_is_typed_holds(line: str, tokenizer: str) -> None:
    assert load(line.split()).experiment.tokenizer.name == tokenizer


def test_an_error_elsewhere_does_not_take_the_tokenizer_of_a_task_away() -> None:
    """The slow path composes without Hydra."""
    with pytest.raises(LmlabError) as found:
        load(["data=mqar", "model.n_layer=2"])
    assert [e.message for e in getattr(found.value, "errors", [found.value])] == [
        "`model.n_layer` is not a field of model=decoder"
    ]


@pytest.mark.parametrize("label", [n for n, e in entries("data").items() if e.spec and issubclass(e.spec, TaskSpec)])
def test_every_task_chooses_a_tokenizer_that_writes_it(label: str) -> None:
    entry = entries("data")[label]
    assert entry.spec is not None
    spelled = entry.spec.text  # type: ignore[attr-defined]
    assert entry.selects == {"tokenizer": "byte" if spelled else "ids"}
    task = make(entry.make(), byte_tokenizer(Byte()) if spelled else None)
    assert task.text == spelled
