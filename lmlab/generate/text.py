"""Ids to text as they come: only what later ids can't change any more."""

from __future__ import annotations

import codecs

from lmlab.data.tokenizer import Tokenizer

LOST = "\ufffd"


class TextStream:
    """Feed it ids one by one; what it returns, joined, is the decoded text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.bytes = None if tokenizer.kind == "hf" else codecs.getincrementaldecoder("utf-8")("replace")
        self.ids: list[int] = []  # of a tokenizer whose tokens depend on their neighbours
        self.told, self.start = 0, 0  # ids[start:told] are on the screen and give the next ones their context

    def feed(self, token: int) -> str:
        if self.bytes is not None:
            return self.bytes.decode(self.tokenizer.decode_bytes([token]))
        self.ids.append(token)
        return self._new(final=False)

    def end(self) -> str:
        """What was held back."""
        return self.bytes.decode(b"", final=True) if self.bytes is not None else self._new(final=True)

    def _new(self, *, final: bool) -> str:
        before = self.tokenizer.decode(self.ids[self.start : self.told])
        now = self.tokenizer.decode(self.ids[self.start :])
        if not final and (now.endswith(LOST) or len(now) <= len(before)):
            return ""  # half a character: the next id may finish it
        self.start, self.told = self.told, len(self.ids)
        return now[len(before) :]
