"""Ids to text as they come: only what later ids can't change any more.

The text of new ids is what they add to their prompt's: tokenizers that spell spaces as SentencePiece does drop the one
that begins a text, so that new ids decoded alone would be glued to the prompt.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from lmlab.data.tokenizer import Tokenizer

LOST = "\ufffd"
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
JOINING = ("ByteLevel", "Fuse")  # what stands after them sees one text, not tokens
BY_TOKEN = ("Metaspace", "WordPiece", "BPEDecoder", "ByteFallback", "Replace", "Strip")


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text that `ids` add to that of `prompt`; their own text where they change the prompt's (bytes that spoil a
    character which was whole)."""
    if tokenizer.kind != "hf":
        return tokenizer.decode(ids)
    return _added(tokenizer, prompt, ids)


def _added(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    told, whole = tokenizer.decode(before), tokenizer.decode([*before, *ids])
    return whole[len(told) :] if whole.startswith(told) else tokenizer.decode(ids)


class TextStream:
    """Feed it the ids that follow `prompt`, one by one; what it returns, joined, is `continuation` of them all."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.bytes = None if tokenizer.kind == "hf" else codecs.getincrementaldecoder("utf-8")("replace")
        self.ids = list(prompt)  # of a tokenizer whose tokens depend on their neighbours
        self.start, self.told = 0, len(self.ids)  # ids[start:told] are written and give the next ones their context
        self.waits = _Waits() if self.bytes is not None else _Waits.of(tokenizer)

    def feed(self, token: int) -> str:
        if self.bytes is not None:
            return self.bytes.decode(self.tokenizer.decode_bytes([token]))
        self.ids.append(token)
        if self.waits.for_more(token):
            return ""
        text = self._new()
        if not text or text.endswith(LOST):
            return ""  # half a character: the next id may finish it
        self.start, self.told = self.told, len(self.ids)
        return text

    def end(self) -> str:
        """What was held back."""
        return self.bytes.decode(b"", final=True) if self.bytes is not None else self._new()

    def _new(self) -> str:
        return _added(self.tokenizer, self.ids[self.start : self.told], self.ids[self.told :])


class _Waits:
    """When the text of a tokenizer.json's ids is not known yet: in a run of byte tokens, since one that is no UTF-8
    makes U+FFFD of all of them; always, where its decoder is not known to work token by token."""

    def __init__(self, *, always: bool = False, runs: Iterable[int] = (), silent: Iterable[int] = ()) -> None:
        self.always, self.runs, self.silent, self.now = always, frozenset(runs), frozenset(silent), always

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> _Waits:
        content = json.loads(tokenizer.as_hf()[0])
        steps, added = _steps(content["decoder"]), content["added_tokens"]
        vocab = content["model"]["vocab"]
        if isinstance(vocab, list):
            vocab = {token: n for n, (token, _) in enumerate(vocab)}
        vocab = vocab | {token["content"]: token["id"] for token in added}
        falls_back = any(step["type"] == "ByteFallback" for step in steps)
        runs = [n for token, n in vocab.items() if falls_back and BYTE.fullmatch(token)]
        silent = [token["id"] for token in added if token["special"]]
        return cls(always=not _by_token(steps), runs=runs, silent=silent)

    def for_more(self, token: int) -> bool:
        if not self.always and token not in self.silent:  # a silent one parts nothing
            self.now = token in self.runs
        return self.now


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The decoders that a text goes through, in their order."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _by_token(steps: Sequence[dict[str, Any]]) -> bool:
    """Whether what a token adds depends on the tokens before it alone (and on half characters after it)."""
    joined = False
    for step in steps:
        if step["type"] in JOINING:
            joined = True
        elif step["type"] not in BY_TOKEN or (joined and not _keeps_beginnings(step)):
            return False
    return True


def _keeps_beginnings(step: dict[str, Any]) -> bool:
    """Whether a decoder of a whole text gives a longer text a longer result, that of its beginning and something."""
    if step["type"] == "Strip":
        return step["stop"] == 0 and step["start"] <= 1
    return step["type"] == "Replace" and len(step["pattern"].get("String", "")) == 1
