"""From a run's model to a Hugging Face folder that transformers 4 and 5 read: configuration, weights, tokenizer.

The folder appears whole or not at all. Importing it gives the same weights to the last bit.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lmlab.data.hub import SETTINGS
from lmlab.data.tokenizer import Tokenizer
from lmlab.errors import ConfigError, RunError
from lmlab.interop.families import choose
from lmlab.interop.folder import WHOLE
from lmlab.interop.keys import CONFIG
from lmlab.interop.source import TOKENIZER
from lmlab.interop.tensors import EMBED, exported, parameters
from lmlab.model.spec import Arch
from lmlab.runs.files import atomic_write, disk, sync_dir, to_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Model:
    """What is written: the architecture, its weights by our names, the tokenizer, and the longest row it is made for.

    settings: what the tokenizer_config.json of an imported model said, to be said again.
    """

    arch: Arch
    state: Mapping[str, Tensor]
    tokenizer: Tokenizer
    longest: int
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Exported:
    """What was written, as which family."""

    folder: Path
    family: str
    cls: str
    parameters: int
    dtype: str


def export(model: Model, to: Path, *, family: str | None = None, dtype: str = "float32") -> Exported:
    """Raises ConfigError naming what no family can express, RunError for a folder that has something in it."""
    if dtype not in DTYPES:
        raise ConfigError(f"`--dtype` is {dtype}", f"use one of {', '.join(DTYPES)}")
    refuse_occupied(to)
    model = unpadded(model)
    found = choose(model.arch, len(model.state[EMBED]), model.longest, family)
    tensors = exported(model.state, model.arch, found.family, found.family.pairing(found.config))
    text, end = model.tokenizer.as_hf()
    ids = {"bos_token_id": _id_of(text, model.settings.get("bos_token"), model.tokenizer.eot)}
    ids |= {"eos_token_id": model.tokenizer.eot}
    head = {"architectures": [found.family.cls], "model_type": found.family.model_type}
    config = head | found.config | ids | {"dtype": dtype, "torch_dtype": dtype}
    place = Path(os.path.realpath(to))  # a link to a folder stays one
    temporary = place.with_name(f".{place.name}.tmp-{os.getpid()}")
    with disk(to, "write"):
        try:
            temporary.mkdir(parents=True)
            _write_json(temporary / CONFIG, config)
            _write_json(temporary / "generation_config.json", ids)
            narrow = {n: t if n.endswith(found.family.wide) else t.to(DTYPES[dtype]) for n, t in tensors.items()}
            save_file(narrow, temporary / WHOLE, {"format": "pt"})
            shutil.copymode(temporary / CONFIG, temporary / WHOLE)  # safetensors leaves it to its owner alone
            (temporary / TOKENIZER).write_text(text, encoding="utf-8")
            _write_json(temporary / SETTINGS[-1], model.settings or _settings(model, end))
            os.rename(temporary, place)  # over an empty folder, too
            sync_dir(place.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return Exported(to, found.family.model_type, found.family.cls, parameters(model.state), dtype)


def unpadded(model: Model) -> Model:
    """Without the rows that `model.vocab_multiple` added: transformers would predict them."""
    if model.arch.model.vocab_multiple == 1:
        return model
    padded, n_ids = (EMBED, "head.weight", "head.bias"), model.tokenizer.vocab_size
    state = {name: t[:n_ids].contiguous() if name in padded else t for name, t in model.state.items()}
    sizes: Any = dataclasses.replace(model.arch.model, **{"vocab_multiple": 1})
    return dataclasses.replace(model, arch=dataclasses.replace(model.arch, model=sizes), state=state)


def refuse_occupied(to: Path) -> None:
    if to.exists() and not to.is_dir():
        raise RunError(f"`--to` {to} is a file", "name a folder that is empty, or not there yet")
    if os.path.islink(os.path.realpath(to)):
        raise RunError(f"`--to` {to} is a link that leads in a circle", "name a folder that is empty, or not there yet")
    if to.is_dir() and any(to.iterdir()):
        raise RunError(f"`--to` {to} is not empty", "name a folder that is empty, or not there yet")


def _settings(model: Model, end: str) -> dict[str, Any]:
    """tokenizer_config.json of a tokenizer of ours: text that spells a special token stays text."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.longest,
    }


def _id_of(text: str, named: Any, otherwise: int) -> int:
    """The id of a special token of the tokenizer."""
    from tokenizers import Tokenizer as Backend

    named = named.get("content") if isinstance(named, dict) else named
    found = Backend.from_str(text).token_to_id(named) if isinstance(named, str) else None
    return otherwise if found is None else int(found)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    atomic_write(path, to_json(content, indent=2) + "\n")
