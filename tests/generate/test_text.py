"""What is streamed, joined, is the text; half characters wait for their other half."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import Regex, decoders

from lmlab.data.spec import BPE, Byte
from lmlab.data.tokenizer import Tokenizer, byte_tokenizer, hf_tokenizer, train_bpe
from lmlab.generate.text import TextStream, continuation

TEXT = "Fellow citizens – größer, 日本語 and 🎉🎉 at once.\n\tThe end"


def metaspace() -> Any:
    return decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])


def llama() -> Any:
    """As Llama's and Mistral's files have it."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(steps)


def gemma() -> Any:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def wordpiece() -> Any:
    return decoders.WordPiece(prefix="e", cleanup=True)


def ends() -> Any:
    return decoders.BPEDecoder(suffix="s")  # ends tokens only, as </w> does


def squeezes() -> Any:
    """What is known only at the end."""
    steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Replace(Regex("F.*w"), "-")]
    return decoders.Sequence(steps)


def ctc() -> Any:
    return decoders.CTC(pad_token="a", word_delimiter_token="▁", cleanup=True)


DECODERS = [metaspace, llama, gemma, wordpiece, ends, squeezes, ctc, lambda: None]


def sentencepiece_like(decoder: Any = metaspace) -> Tokenizer:
    """Metaspace: a token's text depends on whether it comes first."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, trainers

    backend = Backend(models.BPE(byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    if decoder() is not None:
        backend.decoder = decoder()
    vocab = ["</s>", "<s>", *(f"<0x{b:02X}>" for b in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=vocab)
    backend.train_from_iterator(["Fellow citizens and the end at once"] * 3, trainer=trainer)
    content = json.loads(backend.to_str())
    content["added_tokens"] = [a for a in content["added_tokens"] if a["content"] in ("</s>", "<s>")]
    return hf_tokenizer(json.dumps(content), {"eos_token": "</s>"}, "here")


def gpt2_like() -> Tokenizer:
    return hf_tokenizer(train_bpe(BPE(300), [TEXT] * 3).as_hf()[0], {"eos_token": "<|endoftext|>"}, "here")


@pytest.mark.parametrize("make", [lambda: byte_tokenizer(Byte()), lambda: train_bpe(BPE(300), [TEXT] * 3), gpt2_like])
def test_streamed_is_decoded(make):
    tokenizer = make()
    ids, stream = tokenizer.encode(TEXT), TextStream(tokenizer)
    parts = [stream.feed(i) for i in ids]
    assert "".join(parts) + stream.end() == tokenizer.decode(ids)
    assert not any("\ufffd" in part for part in parts)
    assert sum(bool(part) for part in parts) > len(ids) // 3  # it does come bit by bit


@pytest.mark.parametrize("decoder", [metaspace, llama, gemma])
def test_the_space_before_the_first_new_token_is_kept(decoder):
    tokenizer = sentencepiece_like(decoder)
    whole = tokenizer.encode("Fellow the the")
    for n in range(1, len(whole)):
        prompt, new = whole[:n], whole[n:]
        assert tokenizer.decode(prompt) + continuation(tokenizer, prompt, new) == tokenizer.decode(whole)
    stream = TextStream(tokenizer, whole[:-1])
    assert stream.feed(whole[-1]) + stream.end() == continuation(tokenizer, whole[:-1], whole[-1:])


@pytest.mark.parametrize("make", [*(lambda d=d: sentencepiece_like(d) for d in DECODERS), gpt2_like])
def test_random_ids_are_streamed_as_they_are_decoded(make):
    tokenizer, draw = make(), random.Random(0)
    some = [
        tokenizer.eot,
        *tokenizer.encode(" Fellow e the\n"),
        *tokenizer.encode("日é"),
    ]  # half of all, else bytes rule
    whole = 0  # of 300 that go on with the prompt's text
    for _ in range(300):
        # half of them of some: most ids are bytes
        ids = [draw.choice(some) if draw.random() < 0.5 else draw.randrange(tokenizer.vocab_size) for _ in range(16)]
        n = draw.randrange(8)
        prompt = draw.choice([ids[:n], tokenizer.encode("Fellow the 日"[: n + 2])])
        stream = TextStream(tokenizer, prompt)
        streamed = "".join(stream.feed(i) for i in ids[n:]) + stream.end()
        assert streamed == continuation(tokenizer, prompt, ids[n:]), (prompt, ids[n:])
        together = tokenizer.decode([*prompt, *ids[n:]])
        whole += tokenizer.decode(prompt) + streamed == together
    assert whole > 150  # bytes that spoil a character of the prompt are the exception


def test_bytes_wait_for_the_end_of_their_run():
    tokenizer = sentencepiece_like(llama)
    content = json.loads(tokenizer.as_hf()[0])["model"]["vocab"]
    ids = [content[token] for token in ("<0x69>", "<0x79>", "<0xFF>", "F", "<0x69>", "F")]
    stream = TextStream(tokenizer)
    assert [stream.feed(i) for i in ids] == ["", "", "", "���F", "", "iF"]


def test_a_character_cut_off_is_told_at_the_end():
    stream = TextStream(byte_tokenizer(Byte()))
    assert stream.feed("é".encode()[0]) == ""
    assert stream.end() == "\ufffd"
