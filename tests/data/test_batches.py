"""Batches: pure in (seed, k), each token once an epoch, each evaluation target exactly once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from data_cases import write

from lmlab.data.batches import Batch, TrainBatches, eval_batches, permute
from lmlab.data.tokens import TokenFile
from lmlab.errors import DataError

Numbered = Callable[..., TokenFile]


def batches(
    tokens: TokenFile, *, rows: int = 4, seq_len: int = 8, seed: int = 0, packing: str = "stream"
) -> TrainBatches:
    return TrainBatches(tokens, rows=rows, seq_len=seq_len, seed=seed, packing=packing, start=0)


@pytest.mark.parametrize("n", [*range(1, 40), 63, 64, 65, 1000, 4097])
def test_permute_is_a_permutation(n: int) -> None:
    keys = np.arange(1, 8, dtype=np.uint64) * np.uint64(0x123456789ABCDEF)
    assert sorted(permute(np.arange(n), n, keys)) == list(range(n))


def test_permute_mixes() -> None:
    n, keys = 10_000, np.arange(1, 8, dtype=np.uint64)
    image = permute(np.arange(n), n, keys)
    assert abs(np.corrcoef(np.arange(n), image)[0, 1]) < 0.05
    assert np.mean(np.diff(image) == 1) < 0.01
    assert abs(np.mean(image[: n // 2]) / n - 0.5) < 0.02


def test_a_batch_is_a_pure_function_of_seed_and_number(numbered: Numbered) -> None:
    tokens = numbered(1000)
    one, other = batches(tokens), batches(tokens)
    forwards = [one.batch(k).hash() for k in range(50)]
    assert [other.batch(k).hash() for k in reversed(range(50))] == forwards[::-1]
    assert len(set(forwards)) == 50
    assert not set(forwards) & {batches(tokens, seed=1).batch(k).hash() for k in range(50)}


def test_batches_do_not_depend_on_how_samples_are_grouped(numbered: Numbered) -> None:
    tokens = numbered(1000)
    four, eight = batches(tokens, rows=4), batches(tokens, rows=8)
    assert (
        np.concatenate([four.starts(k) for k in range(10)]).tolist()
        == np.concatenate([eight.starts(k) for k in range(5)]).tolist()
    )


@pytest.mark.parametrize(
    ("n", "seq_len", "rows"), [(9, 8, 1), (10, 8, 3), (16, 8, 2), (17, 8, 1), (25, 8, 7), (1000, 8, 3), (333, 7, 5)]
)
def test_an_epoch_holds_no_target_twice_and_misses_less_than_two_rows(
    numbered: Numbered, n: int, seq_len: int, rows: int
) -> None:
    made = batches(numbered(n), rows=rows, seq_len=seq_len)
    per_epoch = made.windows_per_epoch
    starts = np.concatenate([made.starts(k) for k in range(3 * per_epoch)])  # `rows` × 3 whole epochs
    for epoch in starts.reshape(-1, per_epoch):
        seen = Counter(s + 1 + i for s in epoch.tolist() for i in range(seq_len))
        assert set(seen.values()) == {1}
        assert min(seen) >= 1
        assert max(seen) < n
        assert n - 1 - len(seen) < 2 * seq_len


def test_every_window_start_occurs(numbered: Numbered) -> None:
    """Window starts: N−T of them."""
    n, seq_len = 40, 8
    made = batches(numbered(n), seq_len=seq_len)
    assert set(np.concatenate([made.starts(k) for k in range(1000)]).tolist()) == set(range(n - seq_len))


def test_epochs_differ(numbered: Numbered) -> None:
    made = batches(numbered(1000), rows=1)
    n = made.windows_per_epoch
    first, second = ([int(made.starts(k)[0]) for k in range(e * n, (e + 1) * n)] for e in (0, 1))
    assert [s // 8 for s in first] != [s // 8 for s in second]


def test_the_shortest_stream_has_one_window(numbered: Numbered) -> None:
    made = batches(numbered(9), rows=2, seq_len=8)
    assert made.windows_per_epoch == 1
    assert made.batch(3).tokens_BT.tolist() == [list(range(8))] * 2
    assert made.batch(3).targets_BT.tolist() == [list(range(1, 9))] * 2


@pytest.mark.parametrize("n", [2, 7, 8])
def test_a_stream_too_short_is_refused(numbered: Numbered, n: int) -> None:
    with pytest.raises(DataError) as caught:
        batches(numbered(n), seq_len=8)
    assert f"has {n} tokens, `model.seq_len` is 8" in caught.value.message
    assert f"model.seq_len to at most {n - 1}" in caught.value.hint


def test_epoch_counts(numbered: Numbered) -> None:
    made = batches(numbered(1000), rows=4, seq_len=8)
    assert made.epoch(0) == 0
    assert made.epoch(made.windows_per_epoch) == 4


def test_targets_follow_tokens_and_types_are_fixed(numbered: Numbered) -> None:
    batch = batches(numbered(1000)).batch(7)
    assert torch.equal(batch.targets_BT, batch.tokens_BT + 1)
    assert torch.equal(batch.positions_BT, torch.arange(8).expand(4, 8))
    assert batch.documents_BT is None
    assert {t.dtype for t in (batch.tokens_BT, batch.targets_BT, batch.positions_BT)} == {torch.int64}
    assert batch.weights_BT.dtype == torch.float32
    assert float(batch.weights_BT.sum()) == 32


def test_rows_and_hash(numbered: Numbered) -> None:
    batch = batches(numbered(1000), packing="documents").batch(7)
    again = [torch.cat([batch.rows(0, 1).tokens_BT, batch.rows(1, 4).tokens_BT])]
    assert torch.equal(again[0], batch.tokens_BT)
    assert batch.rows(0, 4).hash() == batch.hash()
    assert batch.rows(0, 2).hash() != batch.rows(2, 4).hash()
    assert batch.to("cpu").hash() == batch.hash()
    moved = batch.to("meta")
    assert moved.documents_BT is not None
    assert moved.documents_BT.device.type == "meta"


def by_hand(row: list[int], start: int) -> tuple[list[int], list[int]]:
    documents, positions, document, place = [], [], 0, 0
    for token in row:
        if token == start:
            document, place = document + 1, 0
        documents.append(document)
        positions.append(place)
        place += 1
    return documents, positions


@pytest.mark.parametrize("start", [0, 299])
def test_documents_restart_at_end_of_text(tmp_path: Path, start: int) -> None:
    rng = np.random.default_rng(0)
    docs = [rng.integers(1, 299, size=rng.integers(0, 12)) for _ in range(60)]
    tokens = write(tmp_path / "train.bin", docs, start=start)
    made = TrainBatches(tokens, rows=4, seq_len=16, seed=0, packing="documents", start=start)
    for k in range(20):
        check_documents(made.batch(k), start)


def check_documents(batch: Batch, start: int) -> None:
    assert batch.documents_BT is not None
    for row, documents, positions in zip(
        batch.tokens_BT.tolist(), batch.documents_BT.tolist(), batch.positions_BT.tolist(), strict=True
    ):
        assert (documents, positions) == by_hand(row, start)


SIZES = [(n, rows, t) for n in (2, 3, 8, 9, 10, 17, 63, 64, 65, 100) for rows in (1, 3, 4) for t in (1, 5, 8, 32)]


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize(("n", "rows", "seq_len"), SIZES)
def test_evaluation_scores_every_target_exactly_once(
    numbered: Numbered, n: int, rows: int, seq_len: int, packing: str
) -> None:
    tokens = numbered(n)
    for limit in (None, 1, 7, n - 1, n + 5):
        scored: list[int] = []
        for batch in eval_batches(tokens, rows=rows, seq_len=seq_len, packing=packing, start=0, max_tokens=limit):
            assert batch.tokens_BT.shape == (rows, seq_len)
            counted = batch.weights_BT > 0
            assert torch.equal(batch.tokens_BT[counted] + 1, batch.targets_BT[counted])
            scored += batch.targets_BT[counted].tolist()
        assert scored == list(range(1, n))[:limit]


def test_padding_is_a_document_of_its_own(tmp_path: Path) -> None:
    tokens = write(tmp_path / "val.bin", [np.array([5, 6, 7]), np.array([8, 9])])  # 0 5 6 7 0 8 9
    (batch,) = eval_batches(tokens, rows=2, seq_len=8, packing="documents", start=0)
    assert batch.documents_BT is not None
    assert batch.tokens_BT[0].tolist() == [0, 5, 6, 7, 0, 8, 0, 0]
    assert batch.weights_BT[0].tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
    assert batch.documents_BT[0].tolist() == [1, 1, 1, 1, 2, 2, 3, 3]
    assert batch.positions_BT[0].tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert batch.weights_BT[1].tolist() == [0] * 8
    assert batch.positions_BT[1].tolist() == list(range(8))


def test_a_single_token_has_nothing_to_predict(tmp_path: Path) -> None:
    tokens = write(tmp_path / "val.bin", [np.array([], dtype=int)])
    with pytest.raises(DataError, match="the split `val` has 1 token"):
        next(eval_batches(tokens, rows=1, seq_len=4, packing="stream", start=0))


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_a_batch_takes_well_under_a_millisecond(tmp_path: Path, packing: str) -> None:
    rng = np.random.default_rng(0)
    tokens = write(tmp_path / "train.bin", [rng.integers(1, 299, size=500) for _ in range(2000)])
    made = batches(tokens, rows=16, seq_len=256, packing=packing)
    times = []
    for k in range(200):
        start = time.perf_counter()
        made.batch(k)
        times.append(time.perf_counter() - start)
    assert np.percentile(times, 20) < 1e-3  # 0.2 ms on an idle machine; a busy one still has quiet moments
