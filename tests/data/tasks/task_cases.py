"""Every task there is, with defaults and other settings, and tokenizers that spell text in different ways."""

from __future__ import annotations

import functools
from typing import Any

import lmlab.config.tree  # noqa: F401  # fills OPTIONS
from lmlab.data.spec import BPE, Byte, TaskSpec
from lmlab.data.tasks.base import Task
from lmlab.data.tokenizer import Tokenizer, byte_tokenizer, hf_tokenizer, train_bpe
from lmlab.registry import OPTIONS, make

TASKS = [name for name, spec in OPTIONS["data"].items() if issubclass(spec, TaskSpec)]
CORPUS = [
    "The pass key is 12. The sky is blue, 1800 and 1812 are years. " * 3,
    "Remember: the variables with A = 12 are",
]


def bpe() -> Tokenizer:
    """Some words, and some numbers of two digits, are one token."""
    return train_bpe(BPE(vocab_size=300), CORPUS)


def sentencepiece(normalizer: Any = None) -> Tokenizer:
    """As Llama's file: ▁ for spaces, one put before a text, bytes as <0x0A>; no step that parts words."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    letters = [chr(c) for c in range(33, 127)]
    vocab = {"<unk>": 0, "</s>": 1, **{f"<0x{b:02X}>": 2 + b for b in range(256)}}
    for token in ("▁", *letters, *(f"▁{c}" for c in letters), "12", "34", "is", "he"):
        vocab[token] = len(vocab)
    merges = [*(("▁", c) for c in letters), ("1", "2"), ("3", "4"), ("i", "s"), ("h", "e")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), *([normalizer] if normalizer else [])]
    backend.normalizer = normalizers.Sequence(steps)
    strip = [decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), *strip])
    backend.add_special_tokens(["</s>", "<unk>"])
    return hf_tokenizer(backend.to_str(), {"eos_token": "</s>"}, "llama")


TOKENIZERS = {"byte": lambda: byte_tokenizer(Byte()), "bpe": bpe, "sentencepiece": sentencepiece}


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    return TOKENIZERS[kind]()


@functools.cache
def task(name: str, kind: str = "byte", **values: Any) -> Task:
    made: Task = make(OPTIONS["data"][name](**values), tokenizer(kind))
    return made


# name, tokenizer, settings: defaults with every tokenizer, and each field at another value
CASES = [
    *((name, kind, {}) for name in TASKS for kind in (TOKENIZERS if task(name).text else ["byte"])),
    ("mqar", "byte", {"n_pairs": 16, "vocab_size": 64, "filler": "random", "gap_power": 1.0}),
    ("mqar", "byte", {"n_pairs": 1, "vocab_size": 4}),
    ("induction", "byte", {"vocab_size": 3}),
    ("passkey", "bpe", {"digits": 2}),
    ("copy", "byte", {"vocab_size": 4}),
    ("selective_copy", "byte", {"n_tokens": 5, "vocab_size": 4}),
    ("needle", "byte", {"n_needles": 5, "vocab_size": 8}),
    ("needle_text", "bpe", {"n_needles": 5, "digits": 4}),
    ("vt", "bpe", {"n_chains": 3, "n_hops": 1}),
    ("vt", "sentencepiece", {"n_chains": 1, "n_hops": 4}),
]


def case_id(case: Any) -> str:
    name, kind, values = case
    return "-".join([name, kind, *(f"{k}={v}" for k, v in values.items())])
