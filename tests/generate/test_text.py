"""What is streamed, joined, is the text; half characters wait for their other half."""

from __future__ import annotations

import pytest

from lmlab.data.spec import BPE, Byte
from lmlab.data.tokenizer import Tokenizer, byte_tokenizer, hf_tokenizer, train_bpe
from lmlab.generate.text import TextStream

TEXT = "Fellow citizens – größer, 日本語 and 🎉🎉 at once.\n\tThe end"


def sentencepiece_like() -> Tokenizer:
    """Metaspace: a token's text depends on whether it comes first."""
    import json

    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE(byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    vocab = ["</s>", *(f"<0x{b:02X}>" for b in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=vocab)
    backend.train_from_iterator(["Fellow citizens and the end at once"] * 3, trainer=trainer)
    content = json.loads(backend.to_str())
    content["added_tokens"] = [a for a in content["added_tokens"] if a["content"] == "</s>"]
    return hf_tokenizer(json.dumps(content), {"eos_token": "</s>"}, "here")


@pytest.mark.parametrize(
    "make", [lambda: byte_tokenizer(Byte()), lambda: train_bpe(BPE(300), [TEXT] * 3), sentencepiece_like]
)
def test_streamed_is_decoded(make):
    tokenizer = make()
    ids, stream = tokenizer.encode(TEXT), TextStream(tokenizer)
    parts = [stream.feed(i) for i in ids]
    assert "".join(parts) + stream.end() == tokenizer.decode(ids)
    assert not any("\ufffd" in part for part in parts)
    assert sum(bool(part) for part in parts) > len(ids) // 3  # it does come bit by bit


def test_a_character_cut_off_is_told_at_the_end():
    stream = TextStream(byte_tokenizer(Byte()))
    assert stream.feed("é".encode()[0]) == ""
    assert stream.end() == "\ufffd"
