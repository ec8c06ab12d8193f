"""Folders as others write them, made without transformers."""

from __future__ import annotations

import json
from pathlib import Path

TEXTS = ["Fellow citizens of the Senate and of the House of Representatives", "the union is strong, and it grows"]
EOT, BOS = "<|endoftext|>", "<s>"


def tokenizer_folder(folder: Path, more: int = 0) -> Path:
    """A byte-level BPE of 256 bytes, `more` merges and end-of-text, as tokenizer.json and tokenizer_config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + more, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(TEXTS, trainer=trainer)
    backend.add_special_tokens([EOT])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    settings = {"eos_token": EOT, "bos_token": EOT, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def begun(folder: Path, name: str = BOS) -> Path:
    """The folder's tokenizer with a template that puts `name` before a text, as Llama's has it; the next id where it is
    new."""
    from tokenizers import Tokenizer, processors

    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    backend = Tokenizer.from_file(str(file))
    backend.add_special_tokens([name])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{name} $A", pair=f"{name} $A {name} $B", special_tokens=[(name, backend.token_to_id(name))]
    )
    backend.save(str(file))
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"bos_token": name}))
    return folder
