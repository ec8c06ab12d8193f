"""Prompts in, tokens out: prefill in chunks, then one forward pass per token over a cache of keys and values."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Optional, Union

import torch
from torch import Tensor

from lmlab.errors import LmlabError, RunError
from lmlab.generate.sampling import GREEDY, Sampling, allowed, pick, uniforms
from lmlab.generate.step import Step, whole
from lmlab.model.cache import FULL, Cache, CacheKind
from lmlab.model.transformer import Transformer

CHUNK = 512  # tokens of a row in one forward pass of the prefill
LOOK_EVERY = 16  # tokens between two looks, on an accelerator, at whether all rows have ended, or broken

OnTokens = Callable[[list[int]], Optional[bool]]


@dataclass
class Generated:
    """`tokens`: the new ones of each row, without the one that ended it; `ended`: whether there was one."""

    tokens: list[list[int]] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0  # one forward pass each, of all rows, those after an end too; the prefill gives the first
    decode_s: float = 0.0
    decode_path: str = ""  # how a step was computed, and why not by a CUDA graph
    cache_bytes: int = 0

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prefill_tokens / max(self.prefill_s, 1e-9)

    @property
    def decode_tokens_per_s(self) -> float:
        return self.decode_tokens / max(self.decode_s, 1e-9)


class Rows:
    """Prompts of one batch, padded on the left; logical positions begin at 0 in each."""

    def __init__(self, prompts: Sequence[Sequence[int]], max_new: int, device: torch.device) -> None:
        longest = max(len(p) for p in prompts)
        filled = [[0] * (longest - len(p)) + list(p) for p in prompts]
        self.tokens_BT = torch.tensor(filled, device=device)
        self.lengths_B1 = torch.tensor([[len(p)] for p in prompts], device=device)
        inside = torch.arange(longest, device=device) - (longest - self.lengths_B1)
        self.positions_BT = inside.clamp_min(0)
        self.valid_BT = None if all(len(p) == longest for p in prompts) else inside >= 0
        self.declared_B1 = self.lengths_B1 + max_new  # what scalings of rotations are asked for

    def repeat(self, n: int) -> None:
        """n copies of each row."""
        names = ("tokens_BT", "lengths_B1", "positions_BT", "valid_BT", "declared_B1")
        for name in names:
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else tensor.repeat_interleave(n, 0))

    def add(self, ids_B: Tensor) -> None:
        """One more token at the end of each row."""
        self.tokens_BT = torch.cat((self.tokens_BT, ids_B[:, None]), 1)
        self.positions_BT = torch.cat((self.positions_BT, self.positions_BT[:, -1:] + 1), 1)
        if self.valid_BT is not None:
            self.valid_BT = torch.cat((self.valid_BT, torch.ones_like(self.valid_BT[:, :1])), 1)


@torch.no_grad()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int,
    sampling: Sampling = GREEDY,
    samples: int = 1,
    kind: Optional[CacheKind] = FULL,
    end: Union[int, Sequence[int], None] = None,
    forbidden_V: Optional[Tensor] = None,
    on_tokens: Optional[OnTokens] = None,
    graph: bool = True,
) -> Generated:
    """Continue each prompt (ids, at least one) `samples` times by up to `max_new` tokens; a row ends at an id of `end`.

    kind None: no cache, every token computes the whole row again. on_tokens hears the new id of each row, −1 after its
    end, and ends all rows by True. graph False: on CUDA too, no step is recorded. The model's mode is put back; no
    global generator is touched. Raises LmlabError for an empty prompt, RunError for logits that are no numbers.
    """
    if not prompts or not all(prompts):
        raise LmlabError("a prompt has no tokens", "begin it with the end-of-text token, as documents do in training")
    ends = () if end is None else (end,) if isinstance(end, int) else tuple(end)
    device = model.embed.weight.device
    was_training, found = model.training, Generated(prefill_tokens=sum(len(p) for p in prompts))
    model.eval()
    try:
        with model.eager():
            rows, begun = Rows(prompts, max_new, device), _now(device)
            cache = None if kind is None else Cache(model, kind, max_len=rows.tokens_BT.shape[1] + max_new)
            logits_BV = _prefilled(model, rows, cache)
            if samples > 1:
                logits_BV = logits_BV.repeat_interleave(samples, 0)
                rows.repeat(samples)
                if cache is not None:
                    cache.fork(samples)
            found.prefill_s = _now(device) - begun
            copies = [prompt for prompt in prompts for _ in range(samples)]
            uniform_BN = uniforms(sampling, copies, max_new).to(device)
            step = Step(model, rows, cache, max_new if graph else 0)
            found.decode_path = step.path
            begun = _now(device)
            out_BN = _decoded(step, logits_BV, uniform_BN, sampling, ends, forbidden_V, on_tokens)
            found.decode_s = _now(device) - begun
            found.decode_tokens = out_BN[:, 1:].numel()
            found.cache_bytes = 0 if cache is None else cache.n_bytes
    finally:
        model.train(was_training)
    for ids in out_BN.tolist():
        stop = next((n for n, i in enumerate(ids) if i in ends), None)
        found.tokens.append(ids[:stop])
        found.ended.append(stop is not None)
    return found


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _prefilled(model: Transformer, rows: Rows, cache: Optional[Cache]) -> Tensor:
    """(B, V) logits after the prompts."""
    if cache is None:
        return whole(model, rows)
    T = rows.tokens_BT.shape[1]
    for start in range(0, T, CHUNK):
        part = slice(start, start + CHUNK)
        logits_B1V = model(
            rows.tokens_BT[:, part],
            rows.positions_BT[:, part],
            valid_BT=None if rows.valid_BT is None else rows.valid_BT[:, part],
            length_BT=rows.declared_B1,
            cache=cache,
            last=1,
        ).logits_BTV
    assert logits_B1V is not None
    return logits_B1V[:, -1]


def _decoded(
    step: Step,
    logits_BV: Tensor,
    uniform_BN: Tensor,
    sampling: Sampling,
    ends: Sequence[int],
    forbidden_V: Optional[Tensor],
    on_tokens: Optional[OnTokens],
) -> Tensor:
    """(B, up to N) new ids."""
    out: list[Tensor] = []
    ended_B = torch.zeros(len(logits_BV), dtype=torch.bool, device=logits_BV.device)
    broken = ended_B.any()  # a scalar on the device: whether any logits were no numbers
    every = 1 if logits_BV.device.type == "cpu" or on_tokens is not None else LOOK_EVERY
    N = uniform_BN.shape[1]
    for n in range(N):
        logits_BV = allowed(logits_BV, forbidden_V)
        broken = broken | ~logits_BV.amax(-1).isfinite().all()
        if n + 1 == N or (n + 1) % every == 0:
            _refuse_broken(broken)
        ids_B = pick(logits_BV, uniform_BN[:, n], sampling)
        out.append(ids_B)
        for end in ends:
            ended_B = ended_B | (ids_B == end)
        if on_tokens is not None and on_tokens(ids_B.masked_fill(ended_B, -1).tolist()):
            break
        if n + 1 == N or (ends and (n + 1) % every == 0 and bool(ended_B.all())):
            break
        logits_BV = step(ids_B)
    return torch.stack(out, 1) if out else logits_BV.new_empty(len(logits_BV), 0, dtype=torch.long)


def _refuse_broken(broken: Tensor) -> None:
    if bool(broken):
        raise RunError(
            "the model gives a next token no finite score: NaN or infinity",
            "its weights have diverged or are damaged: name an earlier checkpoint, or try train.precision=fp32",
        )
