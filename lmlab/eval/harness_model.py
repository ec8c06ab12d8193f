"""A model of ours as lm_eval (EleutherAI's evaluation harness) asks for one: scores of texts, and texts.

Needs the extra `lm-eval`. Rows are padded on the left with their own logical positions, so that a figure does not
depend on who else is in the batch. What is cut off, because a request is longer than the model's rows, is counted by
task.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from lmlab.data.tokenizer import Tokenizer
from lmlab.errors import ConfigError
from lmlab.eval.harness_kwargs import Asked, asked, cut
from lmlab.generate.decode import Rows, generate
from lmlab.generate.sample import unwritable
from lmlab.generate.text import TextStream
from lmlab.model.transformer import Transformer

ALWAYS, EMPTY = "always", "empty"
BOS = (ALWAYS, EMPTY)  # the start of a document before every context, or only where there is no context
Row = tuple[list[int], list[int]]  # ids that are given, at least one; ids that are scored
Progress = Callable[[str, float], None]


class HarnessModel(TemplateLM):
    """`max_length`: ids of a row at most (None = what the model was trained on). `bos`: always | empty. `ends`: ids
    that end a text (None = end-of-text).

    requests, cut_requests, cut_tokens: by name of the task. Raises ConfigError for a model whose tokens see later ones.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        batch_size: int = 8,
        bos: str = ALWAYS,
        max_length: Optional[int] = None,
        ends: Optional[Sequence[int]] = None,
        seed: int = 0,
        progress: Progress = lambda what, share: None,
    ) -> None:
        super().__init__()
        if bos not in BOS:
            raise ConfigError(f"`bos` is {bos}", f"use {' or '.join(BOS)}")
        if model.noncausal():
            raise ConfigError(
                f"this model is not causal: {model.noncausal()}", "its scores of texts would mean nothing"
            )
        self.model, self._tokenizer, self.batch_size, self.bos = model, tokenizer, batch_size, bos
        self.max_length, self.seed, self._progress = max_length or model.dims.seq_len, seed, progress
        self.ends = (tokenizer.eot,) if ends is None else tuple(ends)
        self._device = model.embed.weight.device
        self.requests: Counter[str] = Counter()
        self.cut_requests: Counter[str] = Counter()
        self.cut_tokens: Counter[str] = Counter()

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eot

    @property
    def prefix_token_id(self) -> int:
        """What stands before each document in training, and before a text that has nothing before it."""
        return self._tokenizer.start

    def tok_encode(self, string: str, add_special_tokens: Optional[bool] = None, **kwargs: Any) -> list[int]:
        """Ids; the start of a document before them when asked, and, when nothing is said, as `bos` has it."""
        first = self.bos == ALWAYS if add_special_tokens is None else add_special_tokens
        return [self.prefix_token_id] * first + self._tokenizer.encode(string)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(Σ ln p of the continuation, whether greedy decoding gives it) of each (context, continuation)."""
        rows = [self._row(*request.args) for request in requests]
        for request, (given, scored) in zip(requests, rows, strict=True):
            self._count(request, len(given) + len(scored) - 1 - self.max_length)
        found = self._loglikelihood_tokens([("", *row) for row in rows])
        for request, result in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, result)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Σ ln p of each text, every token once: rows of `max_length`, the first after a start, the last full."""
        windows: list[list[Row]] = []
        for request in requests:
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            made = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            windows.append([make_disjoint_window(window) for window in made])
            assert sum(len(scored) for _, scored in windows[-1]) == len(ids), "every token is scored once"
            self._count(request, 0)
        scores = iter(self._loglikelihood_tokens([("", *row) for rows in windows for row in rows]))
        found = [sum(next(scores)[0] for _ in rows) for rows in windows]
        for request, result in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, up to the first of its stop strings, an end-of-text or `max_gen_toks`.

        Equal requests that are sampled differ; each is what it is alone. Raises ConfigError for a setting that
        generation has not.
        """
        groups: dict[tuple[Asked, int], list[tuple[int, list[int]]]] = defaultdict(list)
        seen: Counter[Any] = Counter()
        for n, request in enumerate(requests):
            how, prompt = asked(request.args[1], self.max_length), self._prompt(request.args[0])
            room = self.max_length - how.max_new
            self._count(request, len(prompt) - room)
            prompt = prompt[-room:]
            copy = seen[how, tuple(prompt)] if how.sampling.temperature else 0
            seen[how, tuple(prompt)] += 1
            groups[how, copy].append((n, prompt))
        found: dict[int, str] = {}
        for (how, copy), members in groups.items():
            members.sort(key=lambda member: -len(member[1]))
            for batch in _batches(members, self.batch_size):
                found |= zip((n for n, _ in batch), self._continued([p for _, p in batch], how, copy), strict=True)
                self._progress("generate_until", len(found) / len(requests))
        for n, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, found[n])
        return [found[n] for n in range(len(requests))]

    def _row(self, context: str, continuation: str) -> Row:
        """As lm_eval has it: spaces at the end of the context go to the continuation, both are encoded together, and
        the context's own number of ids is taken off."""
        if context:
            given, scored = self._encode_pair(context, continuation)
        else:
            given, scored = [], self.tok_encode(continuation, add_special_tokens=False)
        if not scored and continuation:  # its letters became part of the context's last token
            scored = self.tok_encode(continuation, add_special_tokens=False)
        if len(scored) > self.max_length:
            raise ConfigError(
                f"a continuation of {len(scored):,} tokens is to be scored, the model's rows have {self.max_length:,}",
                "leave the task out, or evaluate a model with a longer model.seq_len",
            )
        return given or [self.prefix_token_id], scored

    def _prompt(self, context: str) -> list[int]:
        return self.tok_encode(context) or [self.prefix_token_id]

    def _count(self, request: Any, too_many: int) -> None:
        self.requests[request.task_name] += 1
        if too_many > 0:
            self.cut_requests[request.task_name] += 1
            self.cut_tokens[request.task_name] += too_many

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Of rows of ids; the longest first, so that what memory can't hold fails at once."""
        rows = [(given, scored) for _, given, scored in requests]
        found = [(0.0, True)] * len(rows)  # nothing to score is certain
        order = sorted((n for n, row in enumerate(rows) if row[1]), key=lambda n: -len(rows[n][0]) - len(rows[n][1]))
        was_training, done = self.model.training, 0
        self.model.eval()
        try:
            with self.model.eager():  # each batch has another length
                for batch in _batches(order, self.batch_size):
                    for n, result in zip(batch, self._scores([rows[n] for n in batch]), strict=True):
                        found[n] = result
                    done += len(batch)
                    self._progress("loglikelihood", done / len(order))
        finally:
            self.model.train(was_training)
        return found

    def _scores(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """Of one batch. The scored ids are the last of each row, and so are the logits before them:

        .  .  a  b  c  d        inputs  ·  ·  a  b  c        scored, N = 3   ·  c  d
        e  f  g  h  i  j                e  f  g  h  i                        h  i  j
        """
        inputs = [(given + scored)[-(self.max_length + 1) :][:-1] for given, scored in rows]
        N = max(len(scored) for _, scored in rows)
        batch = Rows(inputs, 0, self._device)
        padded = [[-1] * (N - len(scored)) + scored for _, scored in rows]
        targets_BN = torch.tensor(padded, device=self._device)
        logits_BNV = self.model(
            batch.tokens_BT, batch.positions_BT, valid_BT=batch.valid_BT, length_BT=batch.declared_B1, last=N
        ).logits_BTV
        return _log_probabilities(logits_BNV, targets_BN)

    def _continued(self, prompts: list[list[int]], how: Asked, copy: int) -> list[str]:
        made = generate(
            self.model,
            prompts,
            max_new=how.max_new,
            sampling=how.seeded(self.seed, copy),
            end=self.ends,
            forbidden_V=unwritable(self.model, self._tokenizer),
            on_tokens=_Stops(self._tokenizer, how.until, len(prompts)),
        )
        return [cut(self._tokenizer.decode(ids), how.until) for ids in made.tokens]


class _Stops:
    """Hears the new id of each row; True when every row has ended or holds one of the stop strings."""

    def __init__(self, tokenizer: Tokenizer, until: Sequence[str], n: int) -> None:
        self.until, self.longest = until, max(map(len, until), default=0)
        self.streams = [TextStream(tokenizer) for _ in range(n)]
        self.tails = [""] * n
        self.done = [False] * n

    def __call__(self, ids: list[int]) -> bool:
        for row, token in enumerate(ids):
            if token < 0:
                self.done[row] = True
            elif not self.done[row]:
                text = self.tails[row] + self.streams[row].feed(token)
                self.done[row] = any(stop in text for stop in self.until)
                self.tails[row] = text[-self.longest :] if self.longest else ""
        return all(self.done)


def _log_probabilities(logits_BNV: Tensor, targets_BN: Tensor) -> list[tuple[float, bool]]:
    """(Σ ln p, all are the likeliest) of the targets of each row; −1 is none. At least fp32, added up in float64."""
    logits_BNV = logits_BNV.to(torch.promote_types(logits_BNV.dtype, torch.float32))
    counted_BN = targets_BN >= 0
    chosen_BN = logits_BNV.gather(-1, targets_BN.clamp_min(0)[..., None])[..., 0]
    log_p_BN = chosen_BN - torch.logsumexp(logits_BNV, -1)
    sums = log_p_BN.double().masked_fill(~counted_BN, 0.0).sum(-1)
    greedy = ((logits_BNV.argmax(-1) == targets_BN) | ~counted_BN).all(-1)
    return list(zip(sums.tolist(), greedy.tolist(), strict=True))


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
