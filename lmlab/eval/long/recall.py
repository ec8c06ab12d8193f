"""What a text model recalls from far back, asked of windows made of its own text: a repeated row (induction heads,
Olsson et al. 2022, 2209.11895), and one word said once in a document (a needle). One forward per window."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lmlab.data.tokenizer import Tokenizer
from lmlab.errors import DataError
from lmlab.eval.long.nats import hidden, token_nats
from lmlab.eval.long.sums import mean_se
from lmlab.eval.long.windows import BATCH_TOKENS, TokenSet
from lmlab.model.transformer import Transformer

N_CANDIDATES = 10
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SPENT_TOKENS, LEAST, MOST = 32_768, 10, 100  # of one kind at one length: about so many tokens, windows between these
COPIES_TOKENS, LEAST_COPIES, MOST_COPIES = 8192, 4, 64
LEAD_IN, END = "\nThe code word of the day is", "."


def draws(*names: object) -> np.random.Generator:
    """A generator that is a pure function of the names."""
    digest = hashlib.blake2b(" ".join(map(str, names)).encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


# ---------------------------------------------------------------- a row repeated


def copies(model: Transformer, found: TokenSet, start: int, length: int) -> dict[str, Any]:
    """Tokens drawn from the text without its order, then the same again, behind the start token: nats of the first copy
    less those of the second, and how often the next token is the likeliest, in each. Of equal tokens: the first of each
    copy is left out, for nothing says that the row begins again."""
    pool = np.concatenate([unit.ids for unit in found.units])
    pool = pool[pool != start]
    half, n = (length - 1) // 2, min(MOST_COPIES, max(LEAST_COPIES, COPIES_TOKENS // length))
    rows = np.stack([draws("copies", length, i).choice(pool, half) for i in range(n)])
    window = np.concatenate([np.full((n, 1), start), rows, rows], 1)
    gains, correct, guessed = [], 0, 0
    for some in torch.from_numpy(window).split(max(1, BATCH_TOKENS // window.shape[1])):
        nats_BT, hit_BT = token_nats(model, some[:, :-1], some[:, 1:])
        first, second = nats_BT[:, 1:half], nats_BT[:, half + 1 :]
        gains += (first - second).double().mean(1).tolist()
        guessed += int(hit_BT[:, 1:half].sum())
        correct += int(hit_BT[:, half + 1 :].sum())
    gain, se = mean_se(gains)
    tokens = n * (half - 1)
    own = {"n": n, "gain": gain, "gain_se": se, "correct": correct, "tokens": tokens, "accuracy": correct / tokens}
    return own | {"first_correct": guessed}


# ---------------------------------------------------------------- a needle


@dataclass(frozen=True)
class Needle:
    """A sentence around one word, and the same words again without it: what comes next is asked of ten words."""

    lead_in: list[int]
    end: list[int]
    words: np.ndarray  # ids that a word can be, one token each

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Needle:
        """Raises DataError for a tokenizer that can't spell the sentence, or has no ten words of one token."""
        words = _words(tokenizer, re.compile(rb" [a-z]{3,}"))
        lead_in = LEAD_IN
        if len(words) < N_CANDIDATES:  # bytes and characters: a letter will do
            words, lead_in = _words(tokenizer, re.compile(rb"[a-z]")), f"{LEAD_IN} "
        spelled = tokenizer.encode(lead_in)
        if len(words) < N_CANDIDATES or tokenizer.decode_bytes(spelled).strip() != lead_in.encode().strip():
            raise DataError(
                f"the needle can't be asked: the tokenizer ({tokenizer.kind}) can't spell “{lead_in.strip()} …” and "
                "ten words of one token each",
                "use a run whose tokenizer keeps lower-case letters; the other figures do not need it",
            )
        return cls(spelled, tokenizer.encode(END), np.asarray(words))

    @property
    def least(self) -> int:
        """Tokens of a window with one token of text."""
        return 2 * len(self.lead_in) + len(self.end) + 3

    def window(
        self, found: TokenSet, start: int, length: int, depth: float, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """((length,) ids that end in the lead-in, (10,) candidates of which the first stands in the needle). depth: of
        the text what share stands before the needle. The candidates are not in the text where it leaves ten."""
        n_text = length - self.least + 1
        ids = found.units[int(rng.integers(len(found.units)))].ids
        at = int(rng.integers(max(1, len(ids) - n_text)))
        text = np.resize(ids[at : at + n_text], n_text)
        free = np.setdiff1d(self.words, text)
        candidates = rng.choice(free if len(free) >= N_CANDIDATES else self.words, N_CANDIDATES, replace=False)
        needle = [*self.lead_in, int(candidates[0]), *self.end]
        before = round(depth * n_text)
        return np.concatenate([[start], text[:before], needle, text[before:], self.lead_in]), candidates


def _words(tokenizer: Tokenizer, form: re.Pattern[bytes]) -> list[int]:
    return [i for i in range(tokenizer.vocab_size) if form.fullmatch(tokenizer.decode_bytes([i]))]


@torch.no_grad()
def needles(model: Transformer, needle: Needle, found: TokenSet, start: int, length: int) -> list[dict[str, Any]]:
    """Per depth: in how many windows the needle's word is the likeliest of ten (chance 1/10), and by how many nats
    ln p(word) lies above the mean of the ten: 0 on average where the needle says nothing, for any of them may be in
    it."""
    per_depth = min(MOST, max(LEAST, SPENT_TOKENS // length)) // len(DEPTHS)
    size = max(1, BATCH_TOKENS // length)
    told = []
    for depth in DEPTHS:
        made = [needle.window(found, start, length, depth, draws("needle", length, depth, i)) for i in range(per_depth)]
        asked_NC = torch.cat([_asked(model, made[first : first + size]) for first in range(0, per_depth, size)])
        correct = int((asked_NC[:, 0] > asked_NC[:, 1:].amax(1)).sum())
        gain, se = mean_se((asked_NC[:, 0] - asked_NC.mean(1)).tolist())
        told.append({"depth": depth, "n": per_depth, "correct": correct, "gain": gain, "gain_se": se})
    return told


def _asked(model: Transformer, made: list[tuple[np.ndarray, np.ndarray]]) -> torch.Tensor:
    """(windows, 10) float64: the logits of the candidates after each window."""
    window_BT = torch.from_numpy(np.stack([window for window, _ in made])).to(model.embed.weight.device)
    with model.eager():
        logits_BV = model.logits(hidden(model, window_BT)[:, -1:])[:, 0].double().cpu()
    return logits_BV.gather(1, torch.from_numpy(np.stack([candidates for _, candidates in made])))
