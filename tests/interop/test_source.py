"""Where a model comes from, and its tokenizer; the tokenizer that is written is the one that was read."""

from __future__ import annotations

import json
import sys

import pytest

from lmlab.data.hub import tokenizer_files
from lmlab.data.spec import BPE, Byte
from lmlab.data.tokenizer import byte_tokenizer, hf_tokenizer, train_bpe
from lmlab.errors import ConfigError, DataError, RunError
from lmlab.interop.keys import transformers_module
from lmlab.interop.source import located, refuse_other, tokenizer_of
from tests.interop.made import EOT, TEXTS, tokenizer_folder


def test_a_local_folder(tmp_path, monkeypatch):
    (tmp_path / "a model").mkdir()
    monkeypatch.chdir(tmp_path)
    found = located("a model/")
    assert found.folder == tmp_path / "a model"
    assert (found.label, found.path, found.commit) == ("a_model", str(tmp_path / "a model"), None)


@pytest.mark.parametrize("name", ["openai-community/gpt2", "gpt2"])
def test_a_name_of_the_hub_without_network(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="the Hugging Face hub can't be reached") as caught:
        located(name)
    assert "give a local folder" in caught.value.hint


def test_the_folders_tokenizer_and_no_other(tmp_path):
    found = tokenizer_of(tokenizer_folder(tmp_path, more=10))
    assert found.kind == "hf"
    assert found.decode(found.encode(TEXTS[0])) == TEXTS[0]
    refuse_other(found, found.vocab_size, "x")
    with pytest.raises(ConfigError, match="another one"):
        refuse_other(found, found.vocab_size - 1, "x")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"has no tokenizer\.json"):
        tokenizer_of(tmp_path)


@pytest.mark.parametrize("content", ["5", "[1]", "null", '"x"', "{", "[" * 5000, b"\xff"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_settings_that_are_none_are_told(name, content, tmp_path):
    tokenizer_folder(tmp_path)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for read in (tokenizer_of, lambda folder: tokenizer_files(str(folder), None)):
        with pytest.raises(DataError, match=rf"{name} (can't be read|holds no JSON object)"):
            read(tmp_path)


@pytest.mark.parametrize("end", [5, [EOT], False, {"content": 5}])
def test_an_end_that_is_no_text(end, tmp_path):
    (tokenizer_folder(tmp_path) / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    with pytest.raises(DataError, match=r"`eos_token` in tokenizer_config\.json of .* which is no text"):
        tokenizer_of(tmp_path)


@pytest.mark.parametrize("end", [None, {"content": None}, "", EOT, {"content": EOT}])
def test_an_end_that_is_named_or_usual(end, tmp_path):
    (tokenizer_folder(tmp_path) / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    assert tokenizer_of(tmp_path).eot == 256


def test_what_is_proposed_without_an_end_can_be_done(tmp_path):
    file = tokenizer_folder(tmp_path) / "tokenizer_config.json"
    file.write_text(json.dumps({"eos_token": "<none>"}))
    with pytest.raises(DataError, match="has no end-of-text token") as caught:
        tokenizer_of(tmp_path)
    assert "tokenizer.path" in caught.value.hint
    assert "tokenizer=bpe" not in caught.value.hint


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="transformers, which is not installed") as caught:
        transformers_module()
    assert "lmlab[hf]" in caught.value.hint


@pytest.mark.parametrize(
    "made", [lambda: byte_tokenizer(Byte()), lambda: train_bpe(BPE(vocab_size=300), [*TEXTS, f"{EOT}{EOT} {EOT}"] * 3)]
)
def test_what_is_written_has_the_same_ids(made):
    own = made()
    text, end = own.as_hf()
    again = hf_tokenizer(text, {"eos_token": end}, "there")
    assert (again.vocab_size, again.eot) == (own.vocab_size, own.eot)
    for words in (*TEXTS, "é 漢字 🙂", f"a {EOT} b", "\x00\t  x"):
        assert again.encode(words) == own.encode(words)
        assert again.decode(own.encode(words)) == words
    assert (again.token_bytes == own.token_bytes).all()
    assert json.loads(text)["added_tokens"][-1]["id"] == own.eot
