"""Batches: rows of tokens and their targets, cut from a token file.

Training batch k is a pure function of (seed, k), with nothing to save. Epoch e cuts the stream into windows

    start = offset_e + i·T,   i = 0 … n−1,   n = max(1, (N−T) // T)

and visits them in the order of a pseudo-random permutation π_e of 0 … n−1: sample g = k·rows + r is window π_e(g mod n)
of epoch e = g // n. offset_e and π_e are pure functions of (seed, e). Each of the N−T starts can occur; within an epoch
no token is a target twice, and all but fewer than 2T of them are one once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from lmlab.data.tokens import TokenFile, raw
from lmlab.errors import DataError


@dataclass(frozen=True)
class Batch:
    """All (B, T): tokens, targets, positions int64; documents int64 or None; weights float32, 0 = no target.

    whole: no token fills the batch up, so that one without weight is a token to be seen like any other."""

    tokens_BT: torch.Tensor
    targets_BT: torch.Tensor
    positions_BT: torch.Tensor
    documents_BT: torch.Tensor | None
    weights_BT: torch.Tensor
    whole: bool = False

    def _tensors(self) -> dict[str, torch.Tensor | None]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "whole"}

    def rows(self, start: int, stop: int) -> Batch:
        """Rows start … stop−1, as views."""
        return replace(self, **{k: None if v is None else v[start:stop] for k, v in self._tensors().items()})  # type: ignore[arg-type]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        return replace(self, **{k: _moved(v, device, non_blocking) for k, v in self._tensors().items()})  # type: ignore[arg-type]

    def pinned(self) -> Batch:
        """In memory that an accelerator copies from by itself."""
        return replace(self, **{k: None if v is None else _pinned(v) for k, v in self._tensors().items()})  # type: ignore[arg-type]

    def present(self) -> torch.Tensor:
        """(B, T) bool: which tokens are of what is trained or evaluated on, and fill no batch up."""
        return torch.ones_like(self.weights_BT, dtype=torch.bool) if self.whole else self.weights_BT > 0

    def weight(self) -> float:
        """Σ weights, at least 1; of a batch on the host nothing is waited for."""
        return float(self.weights_BT.sum().clamp_min(1))

    def hash(self) -> str:
        """Of everything in it; equal batches have equal hashes on every machine."""
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in self._tensors().items():
            digest.update(f"{name}{None if tensor is None else tuple(tensor.shape)}".encode())
            if tensor is not None:
                digest.update(raw(tensor.cpu().numpy()))
        return digest.hexdigest()


def _moved(tensor: torch.Tensor | None, device: torch.device | str, non_blocking: bool) -> torch.Tensor | None:
    """On `device`; rows that are one row repeated (positions) stay so, which tells the model that they are equal."""
    if tensor is None or tensor.stride(0) != 0:
        return None if tensor is None else tensor.to(device, non_blocking=non_blocking)
    return tensor[:1].to(device, non_blocking=non_blocking).expand(tensor.shape)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.stride(0) != 0 else tensor[:1].pin_memory().expand(tensor.shape)


class TrainBatches:
    """Endless training batches of `rows` × `seq_len` from `tokens`."""

    def __init__(self, tokens: TokenFile, *, rows: int, seq_len: int, seed: int, packing: str, start: int) -> None:
        if tokens.n_tokens <= seq_len:
            raise DataError(
                f"the split `{tokens.path.stem}` has {tokens.n_tokens} tokens, `model.seq_len` is {seq_len}: "
                "a row and its targets need one more token than `model.seq_len`",
                f"set model.seq_len to at most {tokens.n_tokens - 1}, or bring more text",
            )
        self.tokens, self.n_rows, self.seq_len, self.seed = tokens, rows, seq_len, seed
        self.start, self.packing = start, packing
        self.windows_per_epoch = max(1, (tokens.n_tokens - seq_len) // seq_len)
        self._offsets = tokens.n_tokens - seq_len - (self.windows_per_epoch - 1) * seq_len
        self._span = np.arange(seq_len + 1)

    def epoch(self, k: int) -> float:
        """Epochs seen before batch k."""
        return k * self.n_rows / self.windows_per_epoch

    def starts(self, k: int) -> np.ndarray:
        """(rows,) where in the stream the rows of batch k begin."""
        samples = np.arange(k * self.n_rows, (k + 1) * self.n_rows, dtype=np.int64)
        epochs, places = np.divmod(samples, self.windows_per_epoch)
        found = np.empty_like(samples)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            keys = _draws(self.seed, int(epoch))
            offset = int(keys[0]) % self._offsets
            found[here] = offset + permute(places[here], self.windows_per_epoch, keys[1:]) * self.seq_len
        return found

    def batch(self, k: int) -> Batch:
        window = self.tokens.tokens[self.starts(k)[:, None] + self._span]
        return _batch(window.astype(np.int64), packing=self.packing, start=self.start)


def eval_batches(
    tokens: TokenFile, *, rows: int, seq_len: int, packing: str, start: int, max_tokens: int | None = None
) -> Iterator[Batch]:
    """Non-overlapping windows in the order of the file: each target once, whatever `rows` and `seq_len`.

    Every batch has `rows` × `seq_len`; what the last ones lack is filled with weight 0. `max_tokens` scores the first
    that many targets only.
    """
    n_targets = tokens.n_tokens - 1
    if max_tokens is not None:
        n_targets = min(n_targets, max_tokens)
    if n_targets < 1:
        raise DataError(
            f"the split `{tokens.path.stem}` has {tokens.n_tokens} token: nothing to predict", "bring more text"
        )
    per_batch = rows * seq_len
    for first in range(0, n_targets, per_batch):
        n = min(per_batch, n_targets - first)
        flat = np.zeros(per_batch + 1, dtype=np.int64)
        flat[: n + 1] = tokens.tokens[first : first + n + 1]
        window = flat[np.arange(rows)[:, None] * seq_len + np.arange(seq_len + 1)]
        yield _batch(window, packing=packing, start=start, n_targets=n)


def _batch(window: np.ndarray, *, packing: str, start: int, n_targets: int | None = None) -> Batch:
    """window: (B, T+1) ids. With n_targets only the first that many targets, row by row, have weight 1."""
    inputs, targets = window[:, :-1].copy(), window[:, 1:].copy()
    B, T = inputs.shape
    positions, documents = torch.arange(T).expand(B, T), None
    weights = np.ones((B, T), dtype=np.float32)
    scored = B * T if n_targets is None else n_targets
    weights.reshape(-1)[scored:] = 0
    if packing == "documents":
        new = inputs == start
        if scored < B * T:  # the padding is a document of its own, whatever id fills it
            new.reshape(-1)[scored:] = False
            new.reshape(-1)[scored] = True
        documents = torch.from_numpy(np.cumsum(new, axis=1))
        began = np.maximum.accumulate(np.where(new, np.arange(T), 0), axis=1)
        positions = torch.from_numpy(np.arange(T) - began)
    if scored < B * T:
        targets.reshape(-1)[scored:] = 0
        inputs.reshape(-1)[scored:] = 0
    return Batch(
        torch.from_numpy(inputs),
        torch.from_numpy(targets),
        positions,
        documents,
        torch.from_numpy(weights),
    )


def _draws(seed: int, epoch: int) -> np.ndarray:
    """(8,) uint64, a pure function of (seed, epoch) on every machine."""
    return np.frombuffer(hashlib.blake2b(f"lmlab batches {seed} {epoch}".encode()).digest(), dtype="<u8")


def permute(index: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """π(index) for a pseudo-random permutation π of 0 … n−1 chosen by `keys` (one round each), in O(1) memory.

    A Feistel network permutes 0 … 4^h − 1 ≥ n; an image outside is sent through again until it falls inside (cycle
    walking: Black and Rogaway 2002), fewer than 4 times on average.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    image = _feistel(index.astype(np.uint64), half, keys)
    while (outside := image >= n).any():
        image[outside] = _feistel(image[outside], half, keys)
    return image.astype(np.int64)


def _feistel(x: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    low = np.uint64((1 << int(half)) - 1)
    left, right = x >> half, x & low
    for key in keys:
        mixed = (right ^ key) * np.uint64(0x9E3779B97F4A7C15)  # wraps: splitmix64's multipliers and shifts
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        left, right = right, left ^ ((mixed >> np.uint64(32)) & low)
    return (left << half) | right
