"""Tokenizers give every text back, count its bytes, and never read a special id out of text."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmlab.data import hub, tokenizer
from lmlab.data.prepare import Prepared
from lmlab.data.spec import BPE, Byte, HubTokenizer
from lmlab.data.tokenizer import Tokenizer, byte_tokenizer, check_lossless, hf_tokenizer, pieces, train_bpe
from lmlab.errors import DataError
from tests.interop.made import begun

CORPUS = [
    "the cat sat on the mat, the cat's hat sat on that.\n",
    "naïve café ünïcode — “quotes” 中文字符 中文\n\n\tindent",
] * 20
ODD = ["", " ", "  a", "a  ", "\n\n", "\r\n", "\0", "\x1c\x1d x", "\u0085\u2028\u00a0 \u3000", "é", "e\u0301", "\ufeff"]
ODD += ["\ufffd", "\U0010ffff", "👩‍👩‍👧", "Ġ Ċ ▁", "'s 't're", "𝔘", "\x80"]
ODD += ["<|endoftext|>", "a<|endoftext|>b", "<s></s>[SEP][UNK]"]
RANGES = [
    (0, 0x80),
    (0x80, 0x800),
    (0x2000, 0x2070),
    (0x4E00, 0x4F00),
    (0xE000, 0xE010),
    (0xFFF0, 0x10000),
    (0x1F600, 0x1F650),
]


def random_texts(n: int) -> list[str]:
    rng = random.Random(0)
    one = lambda: chr(rng.randrange(*rng.choice(RANGES)))  # noqa: E731
    return ["".join(one() for _ in range(rng.randrange(40))) for _ in range(n)]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(BPE(vocab_size=400), CORPUS)


@pytest.fixture(params=["bpe", "byte"])
def own(request: pytest.FixtureRequest, bpe: Tokenizer) -> Tokenizer:
    return bpe if request.param == "bpe" else byte_tokenizer(Byte())


@pytest.mark.parametrize("text", ODD, ids=ascii)
def test_odd_text_comes_back(own: Tokenizer, text: str) -> None:
    ids = own.encode(text)
    assert own.decode(ids) == text
    assert own.decode_bytes(ids) == text.encode()
    assert own.token_bytes[ids].sum() == len(text.encode())
    assert own.eot not in ids


def test_random_unicode_comes_back(own: Tokenizer) -> None:
    texts = random_texts(500)
    for text, ids in zip(texts, own.encode_batch(texts), strict=True):
        assert own.decode(ids) == text
        assert own.token_bytes[ids].sum() == len(text.encode())
        assert own.encode(text) == ids


def test_all_bytes_have_ids(own: Tokenizer) -> None:
    singles = [own.decode_bytes([i]) for i in range(own.vocab_size)]
    assert {bytes([b]) for b in range(256)} <= set(singles)
    assert own.token_bytes[singles.index(b"\x80")] == 1
    assert own.token_bytes[own.eot] == 0
    assert own.decode([own.eot]) == ""
    assert own.token_bytes.shape == (own.vocab_size,)


def test_byte_ids_are_bytes() -> None:
    own = byte_tokenizer(Byte())
    assert own.encode("aé") == [0x61, 0xC3, 0xA9]
    assert (own.vocab_size, own.eot) == (257, 256)


def test_uniform_byte_model_has_8_bits_per_byte() -> None:
    own = byte_tokenizer(Byte())
    ids = own.encode("any text: 中文")
    nats = len(ids) * math.log(256)
    assert nats / (math.log(2) * own.token_bytes[ids].sum()) == pytest.approx(8.0, abs=1e-12)


def test_no_prefix_space_is_added(bpe: Tokenizer) -> None:
    assert bpe.decode(bpe.encode("the")) == "the"
    assert bpe.encode("the") != bpe.encode(" the")


def test_a_small_corpus_gives_fewer_ids_and_says_how_many() -> None:
    small = train_bpe(BPE(vocab_size=4096), ["abab abab"])
    assert 257 < small.vocab_size < 270
    assert small.eot == small.vocab_size - 1
    assert len(small.token_bytes) == small.vocab_size


@pytest.mark.parametrize("vocab_size", [257, 258, 300])
def test_a_reachable_vocabulary_is_reached(vocab_size: int) -> None:
    assert train_bpe(BPE(vocab_size=vocab_size), CORPUS).vocab_size == vocab_size


def test_a_lone_surrogate_is_refused(own: Tokenizer) -> None:
    with pytest.raises(DataError, match="lone surrogate"):
        own.encode("ab\ud800")


@pytest.mark.parametrize("texts", [ODD, random_texts(100), CORPUS], ids=["odd", "random", "corpus"])
def test_pieces_have_the_ids_of_the_whole(bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> None:
    text = " ".join(texts) + "\n".join(texts) + "  \n".join(texts)
    assert len(list(pieces(text))) == 1
    whole = bpe.encode(text)
    monkeypatch.setattr(tokenizer, "PIECE_CHARS", 20)
    cut = list(pieces(text))
    assert "".join(cut) == text
    assert len(cut) > 8
    assert bpe.encode(text) == whole


SCRIPT = """
import sys
from lmlab.data.corpora import Sotu
from lmlab.data.spec import BPE, Sotu as Spec
from lmlab.data.tokenizer import train_bpe
texts = [text for _, text in Sotu(Spec()).documents()][:25]
made = train_bpe(BPE(vocab_size=1200), texts)
print(made.hash, hash(tuple(made.encode(texts[5]))))
"""


def test_same_corpus_same_merges_for_any_worker_count() -> None:
    seen = set()
    for threads in ("1", "2", "5"):
        env = {
            **os.environ,
            "RAYON_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false" if threads == "1" else "true",
        }
        env["PYTHONHASHSEED"] = "0"
        seen.add(
            subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True).stdout
        )
    assert len(seen) == 1


def test_save_and_load(own: Tokenizer, tmp_path: Path) -> None:
    own.save(tmp_path / "t")
    again = Tokenizer.load(tmp_path / "t")
    assert (again.hash, again.eot, again.vocab_size, again.kind) == (own.hash, own.eot, own.vocab_size, own.kind)
    assert again.encode("the naïve cat") == own.encode("the naïve cat")
    assert np.array_equal(again.token_bytes, own.token_bytes)


@pytest.mark.parametrize("file", ["tokenizer.json", "lmlab.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_a_damaged_tokenizer_is_told(bpe: Tokenizer, tmp_path: Path, file: str, damage: str) -> None:
    bpe.save(tmp_path / "t")
    path = tmp_path / "t" / file
    text = path.read_text()
    path.unlink()
    if damage == "cut":
        path.write_text(text[: len(text) // 2])
    if damage == "changed":
        path.write_text(re.sub('"eot": [0-9]+', '"eot": 3', text).replace('"t"', '"☃"'))
    with pytest.raises(DataError, match="is damaged") as caught:
        Tokenizer.load(tmp_path / "t")
    assert "--force" in caught.value.hint


# ---------------------------------------------------------------- tokenizer=hf, from folders


def gpt2_like(folder: Path, *, normalizer: Any = None, special: bool = True, eos: Any = "<|endoftext|>") -> Path:
    """A folder as `save_pretrained` leaves it: end-of-text is id 0 and an added token."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        initial_alphabet=alphabet,
        show_progress=False,
        special_tokens=["<|endoftext|>"] if special else [],
    )
    backend.train_from_iterator(CORPUS, trainer=trainer)
    if not special:
        backend.add_tokens([AddedToken("<|endoftext|>", special=False)])
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    folder.mkdir(parents=True)
    backend.save(str(folder / "tokenizer.json"))
    if eos:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return folder


def load(path: Path | str) -> Tokenizer:
    return tokenizer.load_hf(HubTokenizer(path=str(path)))


@pytest.mark.parametrize("eos", ["<|endoftext|>", {"content": "<|endoftext|>"}, None], ids=["name", "object", "usual"])
@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
def test_hf_text_never_becomes_end_of_text(tmp_path: Path, special: bool, eos: Any) -> None:
    made = load(gpt2_like(tmp_path / "t", special=special, eos=eos))
    for text in [*ODD, *random_texts(50)]:
        ids = made.encode(text)
        assert made.eot not in ids
        assert made.decode(ids) == text
        assert made.token_bytes[ids].sum() == len(text.encode())
        check_lossless(made, text, ids)
    assert made.lossless
    assert made.decode([made.eot, *made.encode("cat")]) == "cat"
    assert made.token_bytes[made.eot] == 0


def test_hf_is_found_as_file_and_survives_save(tmp_path: Path) -> None:
    folder = gpt2_like(tmp_path / "t")
    made = load(folder / "tokenizer.json")
    made.save(tmp_path / "saved")
    again = Tokenizer.load(tmp_path / "saved")
    assert again.hash == made.hash == load(folder).hash
    assert again.encode("a<|endoftext|>b") == made.encode("a<|endoftext|>b")


def test_hf_that_changes_text_is_not_lossless(tmp_path: Path) -> None:
    from tokenizers import normalizers

    made = load(gpt2_like(tmp_path / "t", normalizer=normalizers.Lowercase()))
    check_lossless(made, "the cat", made.encode("the cat"))
    assert made.lossless
    check_lossless(made, "The Cat", made.encode("The Cat"))
    assert not made.lossless
    assert "'The Cat'" in made.lossy_why


def test_hf_wordpiece_is_not_lossless() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    backend = Backend(models.WordPiece({"[UNK]": 0, "the": 1, "cat": 2, "##s": 3, "[SEP]": 4}, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    backend.add_special_tokens(["[UNK]", "[SEP]"])
    made = hf_tokenizer(backend.to_str(), {}, "bert")
    check_lossless(made, "the  cats zzz", made.encode("the  cats zzz"))
    assert (made.eot, made.lossless) == (4, False)


def test_hf_sentencepiece_spelling_counts_bytes() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    vocab = {"<unk>": 0, "</s>": 1, **{f"<0x{b:02X}>": 2 + b for b in range(256)}, "▁": 258, "a": 259, "▁a": 260}
    backend = Backend(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["</s>", "<unk>"])
    made = hf_tokenizer(backend.to_str(), {"eos_token": "</s>"}, "llama")
    for text in ("a a", " a", "aéa 中"):
        check_lossless(made, text, made.encode(text))
        assert made.lossless, made.lossy_why


@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
def test_hf_start_is_what_its_template_puts_before_a_text(tmp_path: Path, special: bool) -> None:
    folder = begun(gpt2_like(tmp_path / "t"), "<s>")
    content = json.loads((folder / "tokenizer.json").read_text())
    added = next(a for a in content["added_tokens"] if a["content"] == "<s>")
    added["special"], bos = special, added["id"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    made = load(folder)
    assert (made.start, made.start_name) == (bos, "<s>")
    assert made.start != made.eot
    assert made.encode_prompt("cat") == [bos, *made.encode("cat")]
    assert bos not in made.encode("a <s> b")
    assert made.token_bytes[bos] == 0
    assert made.decode([bos, *made.encode("cat")]) == "cat"
    made.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").start == bos


def test_without_a_start_of_its_own_it_is_end_of_text(own: Tokenizer, tmp_path: Path) -> None:
    plain, ended = load(gpt2_like(tmp_path / "a")), load(begun(gpt2_like(tmp_path / "b"), "<|endoftext|>"))
    for made in (own, plain, ended):
        assert (made.start, made.start_name) == (made.eot, "end-of-text")


def test_a_template_s_last_token_is_no_start(tmp_path: Path) -> None:
    folder = begun(gpt2_like(tmp_path / "t"), "<s>")
    text = (folder / "tokenizer.json").read_text()
    content = json.loads(text)
    content["post_processor"]["single"].reverse()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    made = load(folder)
    assert made.start == made.eot


WRONG = {
    "nothing there": ("./nowhere", "no such file or folder", "relative names start at"),
    "folder without": (".", "no tokenizer.json in it", "save_pretrained"),
    "not set": ("", "`tokenizer.path` is not set", "tokenizer.path=gpt2"),
    "hub, offline": ("owner/name", "the Hugging Face hub can't be reached", "tokenizer=bpe"),
}


@pytest.mark.parametrize("case", WRONG)
def test_hf_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.chdir(tmp_path)
    path, message, hint = WRONG[case]
    with pytest.raises(DataError) as caught:
        load(path)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert str(caught.value).count("\n") == 1


def test_hf_without_end_of_text_is_refused(tmp_path: Path) -> None:
    folder = gpt2_like(tmp_path / "t", eos="<none>")
    with pytest.raises(DataError, match=r"no end-of-text token \(special tokens: <\|endoftext\|>\)"):
        load(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {}}'])
def test_hf_broken_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(DataError, match=r"can't read tokenizer.json"):
        load(tmp_path)


def test_hf_key_is_of_content_and_not_of_place(tmp_path: Path) -> None:
    one, two = gpt2_like(tmp_path / "one"), gpt2_like(tmp_path / "two")
    assert hub.tokenizer_key(str(one), None) == hub.tokenizer_key(str(two / "tokenizer.json"), None)
    (two / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    assert hub.tokenizer_key(str(one), None) != hub.tokenizer_key(str(two), None)


def test_sotu_bpe_compresses_and_is_lossless(sotu: Prepared) -> None:
    made = sotu.tokenizer
    assert made.vocab_size == 4096
    ids = sotu.val.tokens
    assert made.token_bytes[ids].sum() == sotu.val.raw_bytes == 604_168
    assert 4.0 < sotu.val.raw_bytes / sotu.val.n_tokens < 4.6
