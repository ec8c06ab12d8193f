"""A composition that starts from a run's: `init.run=RUN`, for which `lmlab train --from RUN` is short.

The run's own words come first, typed ones change them; the content hash of its checkpoint becomes `init.source`, and so
part of what the new run is. Torch-free: weights are read when training begins (lmlab/train/start.py).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lmlab.compat import rules
from lmlab.compat.start import check_start, draws, with_weights
from lmlab.config import parse
from lmlab.config.amend import overrides_of, quoted
from lmlab.config.catalogue import PRESET, entries, user_conf
from lmlab.config.fields import fields
from lmlab.config.load import Loaded, Start, load
from lmlab.config.parse import Override
from lmlab.config.tree import Experiment
from lmlab.errors import ConfigError, LmlabError, RunError, raise_all
from lmlab.opened import IMPORTED, experiment_of, refuse_edited, runs_root
from lmlab.registry import Spec
from lmlab.runs.claim import holder
from lmlab.runs.find import Found, resolve
from lmlab.runs.meta import newest, whole
from lmlab.runs.rundir import RunDir

KEY, RESIZE = "init.run", "init.resize"
# Of the run and not of what it trained.
NOT_INHERITED = frozenset({"name", "paths", "wandb", "device", "init", "plugins"})
# A part of these groups that is chosen anew keeps the values of fields that both have: ffn=geglu keeps ffn.d_ff.
KEPT_FIELDS = ("norm", "block", "pos", "rope_scaling", "attn", "ffn", "moe")
Note = Callable[[str], None]


def composed(words: Sequence[str], *, config_dir: str | None = None, note: Note = lambda _: None) -> Loaded:
    """`config.load.load`, and with `init.run=RUN` what starts from RUN. `note` hears of damaged checkpoints.

    Raises what `load` raises, RunError for a run that can't be started from, ConfigError for what its weights can't
    serve."""
    overrides, errors = parse.read(words)
    given = {o.key: o for o in overrides}
    if errors or not names_run(overrides):
        loaded = load(words, config_dir=config_dir)
        raise_all(_without_run(given))
        return loaded
    raise_all(_refused(given))
    found = resolve(_text(given[KEY].value), runs_root(words))
    start, base = _start(found, note)
    typed = [o for o in overrides if o.key not in (KEY, "plugins")]
    own = overrides_of(base, {o.key for o in typed} | NOT_INHERITED)
    kept = _kept_fields(base, typed, config_dir)
    around = [f"{KEY}={quoted(_place(found))}", f"plugins={quoted(_plugins(base, overrides))}"]
    said = [o.typed for o in typed]
    try:
        loaded = load([*own, *kept, *said, *around], config_dir=config_dir, typed=said)
    except LmlabError as error:
        raise_all(with_weights(error, base.arch, [o.key for o in typed]))
        raise
    exp = loaded.experiment
    exp.init.source = start.content_hash
    _trained_length(exp, base, found.run)
    raise_all([*rules.check(exp), *check_start(base.arch, exp.arch, exp.init.resize, found.run.name)])
    raise_all(_seed_of_nothing(given, base, exp))
    return dataclasses.replace(loaded, overrides=list(words), choices=_choices(found.run, loaded, typed), start=start)


def _choices(run: RunDir, loaded: Loaded, typed: Sequence[Override]) -> dict[str, str]:
    """Labels by group: those of the run, and what was typed in their place."""
    theirs = run.manifest().get("choices") or loaded.choices
    return {**theirs, **{o.key: loaded.choices[o.key] for o in typed if o.key in loaded.choices}}


def names_run(overrides: Sequence[Override]) -> bool:
    """Whether `init.run=` names one."""
    return any(o.key == KEY and o.value != "null" for o in overrides)


def refuse_run(words: Sequence[str], command: str) -> None:
    """Raises ConfigError where a command has nothing to start from weights."""
    if names_run(parse.read(words)[0]):
        raise ConfigError(f"`{KEY}` is for training, and `{command}` trains nothing", "leave init.run out")


# ---------------------------------------------------------------- the run


def _start(found: Found, note: Note) -> tuple[Start, Experiment]:
    """Its checkpoint and its experiment. Raises RunError: it is being trained, has no checkpoint, or was edited."""
    run = found.run
    if run.is_claimed():
        raise RunError(
            f"{run.path} is being trained by {holder(run.path)}: its weights are not final",
            "wait for it, or stop it: it saves what it has",
        )
    if found.checkpoint is not None:
        path, meta = _read(found.checkpoint.path)
    else:
        last = newest(run.path, _read, note)
        if last is None:
            raise RunError(
                f"{run.path} has no checkpoint to start from", f"train it first: `lmlab train --resume {run.name}`"
            )
        path, meta = last
    base = experiment_of(run)
    refuse_edited(run)
    if hasattr(base.data, "files") and run.manifest().get("cwd") == os.getcwd():
        base.data.files = run.config()["data"]["files"]  # as they were typed here, not by their whole paths
    return Start(run.path, path, meta["step"], meta["content_hash"], base.arch, run.tokenizer_path), base


def _read(path: Path) -> tuple[Path, dict[str, Any]]:
    """(the checkpoint, its meta.json), its files verified once per process: the members of a sweep share them."""
    try:
        changed = tuple(file.stat().st_mtime_ns for file in sorted(path.iterdir()))
    except OSError:
        changed = ()
    return path, _verified(path.absolute(), changed)


@functools.lru_cache(maxsize=64)
def _verified(path: Path, changed: tuple[int, ...]) -> dict[str, Any]:
    return whole(path)


def _text(value: str) -> str:
    """A name as it was typed: Hydra would read 00123456 and 12e45678 as numbers."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _place(found: Found) -> str:
    """What finds it again from anywhere."""
    return str((found.run.path if found.checkpoint is None else found.checkpoint.path).absolute())


def _plugins(base: Experiment, overrides: Sequence[Override]) -> list[str]:
    """The run's own copies, and those typed besides; a typed file of the same name stands for the copy."""
    typed = parse.plugin_paths(overrides)
    names = {Path(path).name for path in typed}
    return [*(path for path in base.plugins if Path(path).name not in names), *typed]


# ---------------------------------------------------------------- words


def _without_run(given: dict[str, Override]) -> list[LmlabError]:
    resize = given.get(RESIZE)
    if resize is None or resize.value == "none":
        return []
    message = f"`{RESIZE}` is {resize.value}, but weights are drawn: it would do nothing"
    return [ConfigError(message, "name the run to start from: init.run=RUN")]


def _refused(given: dict[str, Override]) -> list[LmlabError]:
    errors: list[LmlabError] = []
    for o in given.values():
        if o.key.partition(".")[0] == "tokenizer":
            hint = "leave it out; other data= is read with the run's own tokenizer"
            errors.append(ConfigError(f"`{o.typed}`: weights that were trained mean nothing to other ids", hint))
        elif o.key == PRESET:
            hint = "leave it out; single keys change what the run has"
            errors.append(ConfigError(f"`{o.typed}` with {given[KEY].typed}: the run says what the parts are", hint))
    return errors


def _kept_fields(base: Experiment, typed: Sequence[Override], config_dir: str | None) -> Iterator[str]:
    """Words for fields that a newly chosen part shares with the run's, where its own file says nothing of them."""
    keys = {o.key for o in typed}
    for o in typed:
        entry = entries(o.key, user_conf(config_dir)).get(str(o.element())) if o.key in KEPT_FIELDS else None
        if entry is None or entry.spec is None:
            continue
        was = getattr(base, o.key)
        for name in fields(entry.spec).keys() & fields(type(was)).keys() - entry.values.keys():
            if f"{o.key}.{name}" not in keys:
                yield f"{o.key}.{name}={quoted(getattr(was, name))}"


def _trained_length(exp: Experiment, base: Experiment, run: RunDir) -> None:
    """The original length of a scaling, when nothing is said, is what the weights were trained at."""
    if getattr(exp.rope_scaling, "original_len", 0) is None:
        exp.rope_scaling.original_len = trained_length(base, run)  # type: ignore[attr-defined]


def trained_length(base: Experiment, run: RunDir) -> int:
    """Tokens of the rows that plain rotations were trained at."""
    scaling: Any = base.rope_scaling
    if isinstance(scaling, Spec) and hasattr(scaling, "original"):
        return int(scaling.original(base.model.seq_len))
    manifest = run.manifest()
    if manifest.get("state") == IMPORTED:
        return int((manifest.get("imported") or {}).get("max_position_embeddings") or base.model.seq_len)
    return base.model.seq_len


def _seed_of_nothing(given: dict[str, Override], base: Experiment, exp: Experiment) -> list[LmlabError]:
    if "seed.init" not in given or draws(base.arch, exp.arch, exp.init.resize):
        return []
    message = f"`seed.init` is {exp.seed.init}, and every weight is the run's: nothing is drawn"
    return [ConfigError(message, "leave seed.init out; seed.data orders the batches")]
