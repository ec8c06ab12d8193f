"""One token set for all lengths; windows that score every target once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lmlab.data.tokens import TokenFile
from lmlab.eval.long.windows import DOCUMENTS, STREAM, TokenSet, Unit, batches, both, token_set, windows


def file_of(path: Path, lengths: list[int], seed: int = 0) -> TokenFile:
    rng = np.random.default_rng(seed)
    docs = [(rng.integers(1, 50, n - 1), n) for n in lengths]
    return TokenFile.write(path / "val.bin", docs, vocab_size=50, start=0, tokenizer_hash="x")


@pytest.mark.parametrize("stride", [1, 8, 31, 32])
def test_a_hundred_tokens_give_99_targets(stride: int) -> None:
    found = list(windows(99, 32, stride))
    assert sum(w.scored for w in found) == 99
    scored = [w.begin + t for w in found for t in range(w.n - w.scored, w.n)]
    assert scored == list(range(99))
    assert all(w.n <= 32 for w in found)
    assert all(w.scored <= stride for w in found[1:])


@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 99])
def test_a_stride_of_the_window_does_not_overlap(n: int) -> None:
    found = list(windows(n, 32, 32))
    assert all(w.scored == w.n for w in found)
    assert [w.begin for w in found] == list(range(0, n, 32))


@pytest.mark.parametrize("n", [1, 31, 32, 33, 49, 64, 99, 128])
@pytest.mark.parametrize("stride", [1, 8, 16, 31, 32])
def test_one_pass_serves_both(n: int, stride: int) -> None:
    found = both(n, 32, stride)
    sliding = [(w.begin, w.n, w.scored) for w in found if w.scored]
    assert sliding == [(w.begin, w.n, w.scored) for w in windows(n, 32, stride)]
    assert [(w.begin, w.n) for w in found if w.apart] == [(w.begin, w.n) for w in windows(n, 32, 32)]
    assert all(w.scored or w.apart for w in found)
    assert len({(w.begin, w.n) for w in found}) == len(found)


@pytest.mark.parametrize("stride", [0, 33])
def test_a_stride_that_skips_targets_is_refused(stride: int) -> None:
    with pytest.raises(ValueError, match="leaves targets out"):
        list(windows(99, 32, stride))


@pytest.mark.parametrize("batch_tokens", [1, 100, 8192])
def test_batches_hold_every_window_once(batch_tokens: int) -> None:
    units = [Unit(0, np.arange(100)), Unit(1, np.arange(1000, 1071))]
    rows = list(batches(TokenSet(DOCUMENTS, units), 32, 8, batch_tokens))
    seen = [w for r in rows for w in r.windows]
    wanted = [w for u, unit in enumerate(units) for w in both(unit.n_targets, 32, 8, u)]
    assert sorted(seen, key=lambda w: (w.unit, w.begin)) == wanted
    for r in rows:
        assert r.tokens_BT.numel() <= max(batch_tokens, r.tokens_BT.shape[1])
        for w, tokens, targets in zip(r.windows, r.tokens_BT, r.targets_BT, strict=True):
            ids = units[w.unit].ids
            assert tokens.tolist() == ids[w.begin : w.begin + w.n].tolist()
            assert targets.tolist() == ids[w.begin + 1 : w.begin + w.n + 1].tolist()


def test_the_token_set_is_the_beginnings_of_long_documents(tmp_path: Path) -> None:
    tokens = file_of(tmp_path, [50, 130, 20, 65, 300])
    found = token_set(tokens, 64, wanted=512)
    assert found.kind == DOCUMENTS
    assert [u.document for u in found.units] == [1, 3, 4]
    assert [u.n_targets for u in found.units] == [128, 64, 128]  # whole multiples of 64, at most 512 / 3 of them
    assert found.units[0].ids.tolist() == tokens.tokens[50:179].tolist()


def test_the_token_set_is_the_stream_where_documents_are_short(tmp_path: Path) -> None:
    tokens = file_of(tmp_path, [50, 130, 20, 65, 300])
    found = token_set(tokens, 200)
    assert found.kind == STREAM
    assert [u.n_targets for u in found.units] == [200, 200]  # 565 tokens
    assert [u.document for u in found.units] == [0, 3]
    assert np.concatenate([u.ids[:-1] for u in found.units]).tolist() == tokens.tokens[:400].tolist()


def test_a_file_that_is_too_short_gives_none(tmp_path: Path) -> None:
    assert token_set(file_of(tmp_path, [50]), 50).units == []
    assert len(token_set(file_of(tmp_path, [51]), 50).units) == 1
