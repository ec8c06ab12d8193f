"""config.json, read strictly: a key that changes what is computed is translated, or refused by name and value.

Values come from transformers' own configuration class, so that its defaults and its readings of old keys hold. Which
keys a family understands is not written down twice: those it asks for are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lmlab.config.fields import show
from lmlab.errors import ConfigError, LmlabError, listed, nearest

CONFIG = "config.json"
EXTRA = "pip install 'lmlab[hf]'"
# Keys that change nothing about the logits of a model in evaluation.
HARMLESS = frozenset(
    (
        "architectures auto_map model_type torch_dtype dtype transformers_version use_cache vocab_size tokenizer_class "
        "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id eos_token prefix "
        "initializer_range initializer_factor init_std max_position_embeddings "
        "attn_implementation _attn_implementation _attn_implementation_autoset _name_or_path _commit_hash "
        "attention_dropout attn_pdrop resid_pdrop embd_pdrop hidden_dropout hidden_dropout_prob classifier_dropout "
        "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout num_labels "
        "id2label label2id problem_type task_specific_params finetuning_task output_attentions output_hidden_states "
        "return_dict return_dict_in_generate chunk_size_feed_forward gradient_checkpointing torchscript "
        "use_bfloat16 pruned_heads is_decoder is_encoder_decoder cross_attention_hidden_size "
        "tie_encoder_decoder max_length min_length do_sample early_stopping num_beams num_beam_groups "
        "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
        "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores forced_bos_token_id "
        "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
        "begin_suppress_tokens pretraining_tp slow_but_exact rope_parameters rope_scaling rope_theta "
        "partial_rotary_factor"
    ).split()
)


class Keys:
    """A configuration of transformers; remembers which keys were asked for."""

    def __init__(self, config: Any, raw: Mapping[str, Any]) -> None:
        self.config, self.raw = config, raw
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return getattr(self.config, key)

    def get(self, key: str, default: Any = None) -> Any:
        """Also of keys that some versions of transformers do not have."""
        self.asked.add(key)
        value = getattr(self.config, key, None)
        return default if value is None else value

    def whole(self, key: str) -> int:
        """A size. Raises ConfigError for what is none."""
        value = self[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise refused(key, value, "only a whole number ≥ 1")
        return value

    def only(self, key: str, *allowed: Any, why: str = "") -> Any:
        """The value, which has to be one of `allowed`. Raises ConfigError."""
        value = self.get(key, None if None in allowed else allowed[0])
        if value not in allowed:
            raise refused(key, value, f"only {' or '.join(map(show, allowed))}" + (f": {why}" if why else ""))
        return value

    def one_of(self, key: str, words: Mapping[str, Any]) -> Any:
        """What the value means to us. Raises ConfigError for a value that is not among `words`."""
        value = self[key]
        if value not in words:
            raise refused(key, value, f"only {listed(words)}")
        return words[value]

    def refuse_unknown(self, harmless: Iterable[str] = ()) -> None:
        """Raises ConfigError for each key of the file that nobody asked for and that says something."""
        aliases, default = getattr(self.config, "attribute_map", {}), _defaults(type(self.config))
        if self.raw.get("is_causal", True) is not True:  # masks are made by it in every family; no class names it
            raise refused("is_causal", self.raw["is_causal"], "only true: a token sees none that follow it")
        known = HARMLESS | {"is_causal"} | set(harmless) | self.asked
        known |= {alias for alias, key in aliases.items() if key in known}
        for key, value in self.raw.items():
            otherwise = default.get(aliases.get(key, key))
            nothing = value == otherwise or (value in (None, False) and otherwise in (None, False))
            if key not in known and not nothing:
                raise refused(key, value, "it is not known to this family")


def _defaults(cls: Any) -> dict[str, Any]:
    found: dict[str, Any] = cls().to_dict()
    return found


class Refused(ConfigError):
    """What config.json says and lmlab's parts can't express. `said`: key and value, as in the file."""

    said = ""


def refused(key: str, value: Any, why: str) -> Refused:
    text = json.dumps(value, default=str)
    text = text if len(text) < 80 else text[:77] + "…"
    error = Refused(
        f"`{key}` of config.json is {text}, which can't be expressed ({why})",
        "this model can't be imported as it is: lmlab's parts would compute something else",
    )
    error.said = f"{key}: {text} of its config.json ({why})"
    return error


# ---------------------------------------------------------------- reading


def read_raw(folder: Path) -> dict[str, Any]:
    """config.json as it stands. Raises ConfigError."""
    file = folder / CONFIG
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} has no {CONFIG}", "give a folder that transformers' save_pretrained wrote"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} can't be read: {error}", "bring it back from where the model came from") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} holds no JSON object", "bring it back from where the model came from")
    return raw


def model_type(raw: Mapping[str, Any], known: Iterable[str]) -> str:
    """The family. Raises ConfigError for one that lmlab has no table for."""
    found, known = str(raw.get("model_type")), sorted(known)
    if found in known:
        return found
    guess = nearest(found, known)
    also = f"; the nearest is {guess}" if guess else ""
    raise ConfigError(
        f"`model_type` of config.json is {raw.get('model_type', 'missing')}, which lmlab has no table for",
        f"families that can be imported: {', '.join(known)}{also}",
    )


def read(folder: Path, raw: Mapping[str, Any]) -> Keys:
    """transformers' reading of the file; no code from the folder is run. Raises ConfigError."""
    transformers = transformers_module()
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except LmlabError:
        raise
    except Exception as error:  # it raises what it likes: KeyError, ValueError, its own strict validation
        text = str(error).strip().splitlines()
        raise ConfigError(
            f"{folder / CONFIG} can't be read by transformers: {text[-1].strip() if text else type(error).__name__}",
            "bring it back from where the model came from",
        ) from error
    return Keys(config, raw)


def transformers_module() -> Any:
    """transformers, quiet. Raises ConfigError when the extra is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("this needs transformers, which is not installed", f"{EXTRA}") from error
    transformers.logging.set_verbosity_error()
    return transformers
