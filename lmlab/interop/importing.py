"""From a Hugging Face folder to a run: words, composition, tensors, and an ordinary run directory.

What the folder decides can't be changed; what does not touch the function (data, training, folders, the length of rows,
the pairing of rotated channels) can be set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lmlab.config import parse
from lmlab.config.catalogue import PRESET
from lmlab.config.identity import changes, config_hash, to_dict
from lmlab.config.load import Loaded, load
from lmlab.config.meaning import FREE, differences, show_value
from lmlab.config.tree import Experiment
from lmlab.data.hub import tokenizer_settings
from lmlab.data.tokenizer import Tokenizer
from lmlab.errors import ConfigError, LmlabError, raise_all
from lmlab.interop import families, keys, rope
from lmlab.interop.families import FAMILIES, Words
from lmlab.interop.family import Family
from lmlab.interop.folder import weights_of
from lmlab.interop.mixtures import JITTER
from lmlab.interop.refusals import by_the_folder
from lmlab.interop.source import Source, located, refuse_other, tokenizer_of
from lmlab.interop.tensors import imported, parameters
from lmlab.model.spec import Arch
from lmlab.runs import checkpoint, manifest
from lmlab.runs.find import run_directory
from lmlab.runs.rundir import RunDir
from lmlab.train.spec import Train

STATE = "imported"  # of the manifest
ROW_TOKENS = 1024  # of a training row, where the model allows it and nothing is said
REFUSED = (PRESET, "plugins", "tokenizer", "tokenizer.revision", "init", "init.run", "init.resize")


@dataclass(frozen=True)
class Described:
    """A folder's model in lmlab's words. longest: tokens that its configuration allows a row, None for any."""

    source: Source
    family: Family
    raw: dict[str, Any]
    words: Words
    rows: int
    longest: int | None

    @property
    def arch(self) -> Arch:
        return families.arch_of(self.words)


@dataclass
class Import:
    """What became of it: the run, the words that compose it, whether it was there already."""

    run: RunDir
    words: list[str]
    loaded: Loaded
    family: str
    parameters: int = 0
    dtypes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    existed: bool = False


def describe(source: Source) -> Described:
    """Reads config.json. Raises ConfigError for whatever lmlab's parts can't express."""
    raw = keys.read_raw(source.folder)
    family = FAMILIES[keys.model_type(raw, FAMILIES)]
    _refuse_other_head(raw, family)
    rope.refuse_unknown_type(raw)
    found = keys.read(source.folder, raw)
    words = family.words(found)
    found.refuse_unknown(family.harmless)
    longest = _longest(found)
    return Described(source, family, raw, words, found.whole("vocab_size"), longest)


def _longest(found: keys.Keys) -> int | None:
    """Tokens that the configuration allows a row, by whichever name the file says it; None where it says nothing."""
    names = ("n_positions", "max_position_embeddings")
    if getattr(found.config, names[1], None) is None:
        return None
    return found.whole(names[0] if names[0] in found.raw else names[1])


def _refuse_other_head(raw: Mapping[str, Any], family: Family) -> None:
    base = family.cls.replace("ForCausalLM", "Model").replace("LMHeadModel", "Model")
    named = raw.get("architectures") or [family.cls]
    named = named if isinstance(named, list) else [named]
    if odd := [name for name in named if name not in (family.cls, base)]:
        raise keys.refused("architectures", odd[0], f"only {family.cls}, which predicts the next token")


# ---------------------------------------------------------------- words


def composed(model: Described, typed: Sequence[str], *, config_dir: str | None = None) -> tuple[list[str], Loaded]:
    """(all words, the experiment): the folder's, defaults that fit them, and the typed ones. Raises ConfigError."""
    overrides, errors = parse.read(typed)
    raise_all(errors)
    given = {o.key: o for o in overrides}
    raise_all([_not_here(key) for key in given if key in REFUSED])
    words = dict(model.words) | _around(model, {key: o.element() for key, o in given.items() if not o.is_choice})
    own = families.typed({k: v for k, v in words.items() if k not in given})
    raise_all(_beyond_table(words))
    try:
        loaded = load([*own, *typed], config_dir=config_dir, imported=True)
    except LmlabError as error:
        raise_all(by_the_folder(error, model.raw, list(given)))
        raise
    raise_all(_disagreements(model.arch, loaded.experiment.arch))
    return [*own, *typed], loaded


def _not_here(key: str) -> LmlabError:
    hint = "leave it out: the folder says what the model is" if key == PRESET else f"leave {key} out"
    return ConfigError(f"`{key}` can't be set at import", hint)


def _around(model: Described, given: Mapping[str, Any]) -> Words:
    """Rows that fit the model, steps of whole rows, and the folder's tokenizer."""
    length = given.get("model.seq_len") or min(ROW_TOKENS, model.longest or ROW_TOKENS)
    found: Words = {"model.seq_len": length, "tokenizer": "hf", "tokenizer.path": model.source.path}
    defaults = Train()
    if isinstance(length, int) and length > 0:
        if defaults.batch_tokens % length:
            found["train.batch_tokens"] = length * max(1, round(defaults.batch_tokens / length))
        if defaults.eval_tokens is not None and defaults.eval_tokens < length:
            found["train.eval_tokens"] = length
    return found


def _beyond_table(words: Words) -> list[LmlabError]:
    length, table = words["model.seq_len"], words.get("pos.max_len")
    if table is None or not isinstance(length, int) or length <= table:
        return []
    message = f"`model.seq_len` is {length}, and the folder's table of positions has {table} rows"
    return [ConfigError(message, f"use model.seq_len={table} or less")]


def _disagreements(folder: Arch, asked: Arch) -> list[LmlabError]:
    free = f"free are {', '.join(FREE)}, pos.pairing and all that is no part of the model"
    return [
        ConfigError(f"`{key}` is {show_value(mine)}, and the folder's is {show_value(own)}", f"leave it out; {free}")
        for key, own, mine in differences(folder, asked)
    ]


# ---------------------------------------------------------------- the run


def import_folder(name: str, typed: Sequence[str], command: Sequence[str]) -> Import:
    """The whole of it. Raises LmlabError; then nothing is left in the folder of runs."""
    model = describe(located(name))
    words, loaded = composed(model, typed)
    exp = loaded.experiment
    words_of = _tokenizer_source(model, exp)
    tokenizer = tokenizer_of(words_of.folder)
    with weights_of(model.source.folder, model.family) as weights:
        pairing = model.family.pairing(model.raw)
        state = imported(weights, exp.arch, model.family, pairing, model.rows)
        dtypes = sorted(weights.dtypes)
    refuse_other(tokenizer, model.rows, words_of.path)
    exp.init.source = checkpoint.content_hash(state)
    path = run_directory(Path(exp.paths.runs).expanduser(), config_hash(exp), exp.name or model.source.label)
    made = Import(RunDir(path), words, loaded, model.family.model_type, parameters(state), dtypes)
    made.notes = list(_notes(model, tokenizer, exp))
    facts = {
        "source": model.source.path,
        "commit": model.source.commit,
        "family": model.family.model_type,
        "dtypes": dtypes,
        "max_position_embeddings": model.longest,
        "tokenizer_config": tokenizer_settings(words_of.folder),
    }
    _write(made, state, tokenizer, facts, command)
    return made


def _tokenizer_source(model: Described, exp: Experiment) -> Source:
    """The folder itself, or the one that `tokenizer.path` names, which is then kept as it is found from anywhere."""
    named: str = exp.tokenizer.path  # type: ignore[attr-defined]
    if named == model.source.path:
        return model.source
    found = located(named, "tokenizer.path")
    exp.tokenizer.path = found.path  # type: ignore[attr-defined]
    return found


def _notes(model: Described, tokenizer: Tokenizer, exp: Experiment) -> Iterator[str]:
    window, length = exp.arch.attn.window, exp.model.seq_len
    if window is not None and window >= length:
        yield f"attn.window {window} is the folder's: it acts on longer texts than the rows of {length} tokens"
    if model.raw.get(JITTER):
        yield f"{JITTER} {model.raw[JITTER]} is left out: theirs is of what experts see, moe.jitter of the router alone"
    if "auto_map" in model.raw:
        yield f"config.json names code in its folder (auto_map), which is not run: the model is {model.family.cls}"
    if tokenizer.vocab_size < model.rows:
        yield f"the embedding has {model.rows} rows, the tokenizer {tokenizer.vocab_size} ids: the others stay in it"


def _write(
    made: Import, state: Mapping[str, Tensor], tokenizer: Tokenizer, facts: dict[str, Any], command: Sequence[str]
) -> None:
    run, exp = made.run, made.loaded.experiment
    with run.claim():
        before = run.manifest()
        same = (before.get("state"), before.get("tokenizer_hash")) == (STATE, tokenizer.hash)
        if same and run.checkpoints():
            made.existed = True
            return
        if run.exists():  # an import that was killed, or one with another tokenizer
            run.set_aside()
        RunDir.create(run.path, to_dict(exp))
        run.save_tokenizer(tokenizer)
        checkpoint.save(run.path, 0, state, {}, config=to_dict(exp), keep_last=1)
        run.update_manifest(
            **manifest.collect(command=command, overrides=made.words),
            state=STATE,
            imported=facts,
            choices=made.loaded.choices,
            changes=changes(exp),
            parameters=made.parameters,
            tokenizer_hash=tokenizer.hash,
        )
