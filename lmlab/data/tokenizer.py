"""Tokenizers: byte-level BPE trained here, plain bytes, one of the Hugging Face hub, or bare ids written as numbers.

Text never becomes a special id: `encode` reads "<|endoftext|>" as thirteen characters. `decode` gives specials as
nothing. `token_bytes` says how many raw bytes each id stands for, so that bits per byte can be told of any of them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lmlab.data.spec import BPE, Byte, Ids
from lmlab.errors import DataError

NAMES = ("tokenizer.json", "lmlab.json")
PIECE_CHARS = 1 << 16
BPE_TRAIN_CHARS = 1 << 30  # what training reads at most: memory and minutes grow, merges hardly change
USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # where the settings name none
BREAK = re.compile(r"(?<=[\w.,;:!?])(?=[ \n])")


class Tokenizer:
    """Ids 0 … vocab_size−1, one of them end-of-text; of bare ids none is (eot −1, which is no id).

    backend: a tokenizers.Tokenizer, or None for plain bytes and bare ids. kind: bpe | byte | hf | ids. `lossless` is
    False, with `lossy_why`, when decoding does not give the text back (then bits per byte can't be told).
    """

    def __init__(self, backend: Any, *, kind: str, eot: int, vocab_size: int) -> None:
        self._backend, self.kind, self.eot, self.vocab_size = backend, kind, eot, vocab_size
        self.lossless, self.lossy_why = True, ""

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without specials. Several threads, unless TOKENIZERS_PARALLELISM=false."""
        try:
            if self.kind == "ids":
                return [self._numbers(text) for text in texts]
            if self._backend is None:
                return [list(text.encode()) for text in texts]
            if self.kind == "hf":  # its pre-tokenizer is unknown, so a text is encoded in one piece
                return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]
            return self._encode_in_pieces(texts)
        except (UnicodeEncodeError, TypeError):  # which of them `tokenizers` raises for a lone surrogate depends
            _refuse_surrogates(texts)
            raise

    def _numbers(self, text: str) -> list[int]:
        """The ids that a text of bare ids names. Raises DataError for a word that is none."""
        for word in text.split():
            if not (word.isascii() and word.isdigit() and int(word) < self.vocab_size):
                raise DataError(
                    f"{word!r} is not an id: this model knows no text, but the numbers 0 to {self.vocab_size - 1}",
                    "write ids with spaces between them, for example: 3 17 5",
                )
        return [int(word) for word in text.split()]

    def _encode_in_pieces(self, texts: Sequence[str]) -> list[list[int]]:
        cut = [list(pieces(text)) for text in texts]
        flat = [piece for of_text in cut for piece in of_text]
        encoded = iter(self._backend.encode_batch_fast(flat, add_special_tokens=False))
        return [[i for _ in of_text for i in next(encoded).ids] for of_text in cut]

    @cached_property
    def start(self) -> int:
        """What a document begins with: the token that its tokenizer.json puts before a text, else end-of-text."""
        own = _start_of(self._backend) if self.kind == "hf" else None
        return self.eot if own is None else own

    @property
    def opening(self) -> list[int]:
        """What a prompt is begun with: the start of a document; nothing where there is none."""
        return [] if self.kind == "ids" else [self.start]

    @property
    def start_name(self) -> str:
        """For a sentence: `<s>`, or end-of-text."""
        return "end-of-text" if self.start == self.eot else str(self._backend.id_to_token(self.start))

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text as its tokenizer.json begins one (with a BOS, say); end-of-text where that gives nothing."""
        if self.kind != "hf":
            return [*self.opening, *self.encode(text)]
        _refuse_surrogates([text])
        return list(self._backend.encode(text, add_special_tokens=True).ids) or [self.eot]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(self._bytes_of[i] for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text; bytes that are no UTF-8 (half a character) become U+FFFD."""
        if self.kind == "hf":
            text: str = self._backend.decode(list(ids), skip_special_tokens=True)
            return text
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """(V,) int64: raw bytes each id stands for; specials and bare ids 0."""
        if self.kind == "ids":
            return np.zeros(self.vocab_size, dtype=np.int64)
        return np.array([len(b) for b in self._bytes_of], dtype=np.int64)

    @cached_property
    def _bytes_of(self) -> list[bytes]:
        if self.kind == "ids":  # with the space before it, so that what follows a prompt can be put after it
            return [f" {i}".encode() for i in range(self.vocab_size)]
        if self._backend is None:
            return [bytes([i]) for i in range(256)] + [b""]
        found = _bytes_of(self._backend, self.vocab_size, self.kind)
        found[self.eot] = found[self.start] = b""
        return found

    @cached_property
    def hash(self) -> str:
        """Of what it computes: the same on every machine and in every folder."""
        content = [self.kind, self.eot, self.vocab_size, self._backend and _content(self._backend, self.kind)]
        text = json.dumps(content, sort_keys=True, ensure_ascii=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def as_hf(self) -> tuple[str, str]:
        """(text of a tokenizer.json that gives the same ids, the text of its end-of-text)."""
        from tokenizers import Tokenizer as Backend

        if self.kind == "ids":
            raise DataError("bare ids have no tokenizer.json", "only a model of text can be taken elsewhere")
        if self.kind == "hf":
            return self._backend.to_str(), self._backend.id_to_token(self.eot)
        backend = _byte_backend() if self._backend is None else Backend.from_str(self._backend.to_str())
        name = next(n for n in _end_names() if backend.token_to_id(n) is None)
        backend.add_special_tokens([name])
        assert backend.token_to_id(name) == self.eot, "end-of-text is the last id"
        return backend.to_str(), name

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        own = {"kind": self.kind, "eot": self.eot, "vocab_size": self.vocab_size, "hash": self.hash}
        own.update(lossless=self.lossless, lossy_why=self.lossy_why)
        if self._backend is not None:
            (folder / NAMES[0]).write_text(self._backend.to_str(), encoding="utf-8")
        (folder / NAMES[1]).write_text(json.dumps(own, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """What `save` wrote. Raises DataError when it is missing or differs from its hash."""
        try:
            own = json.loads((folder / NAMES[1]).read_text(encoding="utf-8"))
            backend = None
            if own["kind"] not in ("byte", "ids"):
                backend = _backend((folder / NAMES[0]).read_text(encoding="utf-8"))
            found = cls(backend, kind=own["kind"], eot=own["eot"], vocab_size=own["vocab_size"])
            found.lossless, found.lossy_why = own["lossless"], own["lossy_why"]
            if found.hash != own["hash"]:
                raise ValueError("its content differs from its hash")
        except Exception as e:  # `tokenizers` raises plain Exception for a broken file
            raise DataError(
                f"tokenizer in `{folder}` is damaged: {e}",
                f"delete {folder.parent} or run `lmlab data prepare --force`",
            ) from e
        return found


def byte_tokenizer(spec: Byte, texts: Iterable[str] = ()) -> Tokenizer:
    """256 bytes, id = byte, and end-of-text 256."""
    return Tokenizer(None, kind="byte", eot=256, vocab_size=257)


def ids_tokenizer(spec: Ids, vocab_size: int) -> Tokenizer:
    """Ids 0 … vocab_size−1 that stand for nothing."""
    found = Tokenizer(None, kind="ids", eot=-1, vocab_size=vocab_size)
    found.lossless, found.lossy_why = False, "ids of a task stand for no text"
    return found


def train_bpe(spec: BPE, texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE (Sennrich et al. 2016, arXiv 1508.07909; bytes as in GPT-2) of `texts`, of at most vocab_size ids.

    No prefix space, all 256 bytes in the alphabet; merges of pairs that occur once are not made, so a small corpus
    gives fewer ids than asked: `vocab_size` of the result says how many. The last id is end-of-text, which `tokenizers`
    never hears of.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab_size - 1,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(_first(texts, BPE_TRAIN_CHARS), trainer=trainer)
    size = backend.get_vocab_size()
    return Tokenizer(backend, kind="bpe", eot=size, vocab_size=size + 1)


def load_hf(spec: Any, texts: Iterable[str] = ()) -> Tokenizer:
    """The tokenizer.json that `spec.path` names (file, folder or hub). Raises DataError when there is none."""
    from lmlab.data import hub

    return hf_tokenizer(*hub.tokenizer_files(spec.path, spec.revision))


def hf_tokenizer(text: str, config: dict[str, Any], where: str) -> Tokenizer:
    """From the text of a tokenizer.json and what tokenizer_config.json and its like say. Raises DataError."""
    named = _named_end(config, where)
    try:
        content = json.loads(text)
        added = {a["content"]: a for a in content.get("added_tokens") or []}
        eot_text = named or next((name for name in USUAL_ENDS if name in added), None)
        if eot_text in added:
            added[eot_text]["special"] = True  # some files leave it plain, and then text would become the id
        content["truncation"] = content["padding"] = None
        backend = _backend(json.dumps(content))
        start = _start_of(backend)
        start_text = None if start is None else backend.id_to_token(start)
        if start_text in added and not added[start_text]["special"]:
            added[start_text]["special"] = True
            backend = _backend(json.dumps(content))
    except Exception as e:  # `tokenizers` raises plain Exception for a broken file
        raise DataError(
            f"`tokenizer.path` {where}: can't read tokenizer.json: {e}", "use a fast tokenizer's file"
        ) from e
    eot = backend.token_to_id(eot_text) if eot_text else None
    if eot is None:
        raise DataError(
            f"`tokenizer.path` {where} has no end-of-text token (special tokens: {', '.join(sorted(added)) or 'none'})",
            "name one as eos_token in its tokenizer_config.json, or another tokenizer as tokenizer.path",
        )
    return Tokenizer(backend, kind="hf", eot=eot, vocab_size=1 + max(backend.get_vocab(True).values()))


def pieces(text: str) -> Iterator[str]:
    """Cut a long text between a word and a space, where no token of the byte-level pattern can reach across: the ids of
    the pieces are the ids of the whole."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        found = BREAK.search(text, start + PIECE_CHARS)
        if found is None:
            break
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def check_lossless(tokenizer: Tokenizer, text: str, ids: list[int], *, decode: bool = True) -> None:
    """Marks the tokenizer as not lossless when `ids` do not stand for as many bytes as `text` has, or, with `decode`,
    do not give it back."""
    n_bytes, counted = len(text.encode()), int(tokenizer.token_bytes[ids].sum())
    if decode and tokenizer.decode(ids) != text:
        tokenizer.lossless, tokenizer.lossy_why = False, f"decode(encode(s)) differs from s for {text[:40]!r}"
    elif n_bytes != counted:
        why = f"its tokens stand for {counted:,} bytes where {text[:40]!r} has {n_bytes:,}"
        tokenizer.lossless, tokenizer.lossy_why = False, why


def _refuse_surrogates(texts: Sequence[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise DataError(
                f"character {e.start} of a text is the lone surrogate {text[e.start]!r}", "use valid Unicode text"
            ) from e


def _first(texts: Iterable[str], limit: int) -> Iterator[str]:
    left = limit
    for text in texts:
        if left <= 0:
            return
        yield from pieces(text)
        left -= len(text)


def _byte_backend() -> Any:
    """Plain bytes as `tokenizers` has them: a byte-level BPE of the 256 bytes, id = byte, without merges."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    backend = Backend(models.BPE(vocab=_byte_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _end_names() -> Iterator[str]:
    """<|endoftext|>, and others for a vocabulary that has learned that text."""
    yield "<|endoftext|>"
    yield from (f"<|endoftext_{n}|>" for n in itertools.count(1))


def _backend(text: str) -> Any:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(text)
    backend.encode_special_tokens = True  # text that spells a special token stays text
    return backend


def _start_of(backend: Any) -> int | None:
    """The token that the file's template puts right before a text, None where it puts none."""
    made = backend.encode("a", add_special_tokens=True)
    before = itertools.takewhile(lambda pair: pair[1], zip(made.ids, made.special_tokens_mask, strict=True))
    return next((int(i) for i, _ in reversed(list(before))), None)


def _content(backend: Any, kind: str) -> Any:
    """What decides the ids. Our BPE's: vocabulary and merges, however a version of `tokenizers` writes them down."""
    written = json.loads(backend.to_str())
    if kind == "hf":
        return written
    merges = [m if isinstance(m, str) else " ".join(m) for m in written["model"]["merges"]]
    return [written["model"]["vocab"], merges]


def _named_end(config: dict[str, Any], where: str) -> str | None:
    """The text of the end-of-text token, where the settings name one. Raises DataError."""
    named = config.get("eos_token")
    named = named.get("content") if isinstance(named, dict) else named
    if named is not None and not isinstance(named, str):
        text = f"`eos_token` in tokenizer_config.json of {where} is {json.dumps(named)}, which is no text"
        raise DataError(text, "name the token that ends a text there, as it is spelled in tokenizer.json")
    return named


def _bytes_of(backend: Any, vocab_size: int, kind: str) -> list[bytes]:
    """Raw bytes of each id: by the byte-level alphabet, or as SentencePiece spells (▁ for space, <0x0A> for bytes)."""
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    plain = {i for i in backend.get_added_tokens_decoder() if i not in special}
    byte_level = kind == "bpe" or '"ByteLevel"' in json.dumps(json.loads(backend.to_str()).get("decoder"))
    alphabet = _byte_alphabet()
    found = []
    for i in range(vocab_size):
        token = backend.id_to_token(i)
        if token is None or i in special:
            found.append(b"")
        elif byte_level and i not in plain and all(c in alphabet for c in token):
            found.append(bytes(alphabet[c] for c in token))
        elif not byte_level and re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            found.append(bytes([int(token[3:5], 16)]))
        else:
            found.append((token if byte_level else token.replace("▁", " ")).encode())
    return found


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letter of each byte: printable Latin-1 stands for itself, the other 68 bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
