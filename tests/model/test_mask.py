"""The mask algebra: what each conjunct hides."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lmlab.model.mask import CAUSAL, Mask, documents, padding, window

CPU = torch.device("cpu")


def drawn(mask: Mask, T: int, S: int | None = None, row: int = 0) -> list[str]:
    S = S or T
    seen = mask.scores().seen(range(T), range(S), T, S, CPU)
    return ["".join("x" if cell else "." for cell in line) for line in seen[row, 0]]


def test_window_counts_the_current_token():
    assert drawn(CAUSAL & window(3), 5) == ["x....", "xx...", "xxx..", ".xxx.", "..xxx"]


@pytest.mark.parametrize(("T", "picture"), [(2, ["xxxx.", "xxxxx"]), (1, ["xxxxx"])])
def test_fewer_queries_than_keys_are_the_last_ones(T, picture):
    assert drawn(CAUSAL, T, 5) == picture


def test_window_with_fewer_queries_than_keys():
    assert drawn(CAUSAL & window(2), 2, 5) == ["..xx.", "...xx"]


def test_documents_are_blocks_on_the_diagonal():
    ids = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    assert drawn(CAUSAL & documents(ids), 4) == ["x...", "xx..", "..x.", "..xx"]
    assert drawn(CAUSAL & documents(ids), 4, row=1) == ["x...", ".x..", ".xx.", ".xxx"]


def test_padding_hides_keys():
    valid = torch.tensor([[False, True, True]])
    assert drawn(CAUSAL & padding(valid), 3) == ["...", ".x.", ".xx"]
    assert drawn(padding(valid), 3) == [".xx"] * 3


def test_and_is_commutative_and_keeps_the_narrower_window():
    a, b = CAUSAL & window(4), window(2) & CAUSAL
    assert drawn(a & b, 4) == drawn(b & a, 4) == drawn(CAUSAL & window(2), 4)


def test_no_mask_is_none_and_only_causal_is_plain():
    assert Mask().scores().seen(range(3), range(3), 3, 3, CPU) is None
    assert CAUSAL.scores().plain_causal()
    assert not (CAUSAL & window(2)).scores().plain_causal()


def test_a_mask_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CAUSAL.causal = False
