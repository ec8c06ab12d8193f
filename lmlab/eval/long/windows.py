"""The tokens that long-context figures are of, and the windows they are read in.

ONE token set serves all lengths: stretches of documents, each as long as the longest length or a multiple of it. A
window of W inputs scores the targets behind them; with stride < W only those that no earlier window scored, so that
every target counts once: N tokens give N−1 of them for any W and stride.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lmlab.data.tokens import TokenFile

DOCUMENTS, STREAM = "documents", "stream"
WANTED_UNITS, LEAST_UNITS = 8, 2
WANTED_TOKENS = 32_768
BATCH_TOKENS = 8192


@dataclass(frozen=True)
class Unit:
    """One stretch: `ids` are n_targets + 1 tokens. document: which one of the file it is of (or its first token is)."""

    document: int
    ids: np.ndarray

    @property
    def n_targets(self) -> int:
        return len(self.ids) - 1


@dataclass(frozen=True)
class TokenSet:
    kind: str  # documents: each unit begins one; stretches of the stream where too few documents are long enough
    units: list[Unit]

    @property
    def n_targets(self) -> int:
        return sum(unit.n_targets for unit in self.units)


@dataclass(frozen=True)
class Window:
    """Inputs ids[begin : begin + n] of a unit; the last `scored` of its n targets count."""

    unit: int
    begin: int
    n: int
    scored: int


@dataclass(frozen=True)
class Rows:
    """Windows of one length, as a batch."""

    windows: list[Window]
    tokens_BT: torch.Tensor
    targets_BT: torch.Tensor


def token_set(tokens: TokenFile, longest: int, wanted: int = WANTED_TOKENS) -> TokenSet:
    """About `wanted` targets (at least 4 stretches' worth where the file has them) in stretches of whole `longest`s:
    the beginnings of the first documents that long; with fewer than two of them, the stream from its start.

    Empty when the file has no `longest` + 1 tokens.
    """
    ends = np.append(tokens.doc_starts[1:], tokens.n_tokens)
    long_enough = [d for d in range(tokens.n_docs) if ends[d] - tokens.doc_starts[d] > longest]
    budget = max(wanted, 4 * longest)
    if len(long_enough) >= LEAST_UNITS:
        chosen = long_enough[: max(LEAST_UNITS, min(WANTED_UNITS, budget // longest))]
        most = max(1, budget // (longest * len(chosen)))
        units = []
        for d in chosen:
            start = int(tokens.doc_starts[d])
            n = min(most, (int(ends[d]) - start - 1) // longest) * longest
            units.append(Unit(d, tokens.tokens[start : start + n + 1].astype(np.int64)))
        return TokenSet(DOCUMENTS, units)
    n_units = min(max(1, budget // longest), (tokens.n_tokens - 1) // longest)
    starts = range(0, n_units * longest, longest)
    of = np.searchsorted(tokens.doc_starts, np.asarray(starts), side="right") - 1
    cut = [tokens.tokens[s : s + longest + 1].astype(np.int64) for s in starts]
    return TokenSet(STREAM, [Unit(int(d), ids) for d, ids in zip(of, cut, strict=True)])


def windows(n_targets: int, length: int, stride: int, unit: int = 0) -> Iterator[Window]:
    """Windows of at most `length` inputs that begin every `stride` tokens and score each of `n_targets` targets once.
    stride = length: no two overlap."""
    if not 1 <= stride <= length:
        raise ValueError(f"a stride of {stride} leaves targets out of windows of {length}")
    done = 0
    for begin in range(0, n_targets, stride):
        end = min(begin + length, n_targets)
        yield Window(unit, begin, end - begin, end - done)
        done = end
        if done == n_targets:
            return


def batches(found: TokenSet, length: int, stride: int, batch_tokens: int = BATCH_TOKENS) -> Iterator[Rows]:
    """All windows of a token set, those of equal length together, as many as `batch_tokens` hold (at least one)."""
    waiting: dict[int, list[Window]] = {}
    for u, unit in enumerate(found.units):
        for window in windows(unit.n_targets, length, stride, u):
            same = waiting.setdefault(window.n, [])
            same.append(window)
            if len(same) == max(1, batch_tokens // window.n):
                yield _rows(found, waiting.pop(window.n))
    for same in waiting.values():
        yield _rows(found, same)


def _rows(found: TokenSet, same: list[Window]) -> Rows:
    cut = np.stack([found.units[w.unit].ids[w.begin : w.begin + w.n + 1] for w in same])
    return Rows(same, torch.from_numpy(cut[:, :-1].copy()), torch.from_numpy(cut[:, 1:].copy()))
