"""`experiment=NAME`: a sweep kept in a file, ./experiments/NAME/sweep.yaml, placed before the words typed.

    overrides: [norm=rmsnorm,layernorm, model=nano]
    flags: [--seeds 2]

A key typed as well replaces the file's; of a flag given twice the typed one holds. It is no group of Hydra's.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmlab.config.parse import ALIASES
from lmlab.errors import ConfigError, listed, nearest

KEY, FOLDER, FILE = "experiment=", "experiments", "sweep.yaml"
MARK = "experiment:"


def expanded(words: Sequence[str]) -> list[str]:
    """The words of a command line `sweep …` with the file's flags and overrides put in. Raises ConfigError."""
    named = [w for w in words if w.startswith(KEY)]
    if not named:
        return list(words)
    if len(named) > 1:
        raise ConfigError(f"`experiment` is given twice: {' and '.join(named)}", "leave one out")
    name = named[0].removeprefix(KEY)
    overrides, flags = _file(name)
    typed = {_key(w) for w in words if "=" in w and not w.startswith("-")}
    kept = [o for o in overrides if _key(o) not in typed]
    if ALIASES["seed"] in typed:
        flags = [f for f in flags if not f.startswith("--seeds")]
    rest = [w for w in words[1:] if w not in named]
    return [words[0], *(part for flag in flags for part in shlex.split(flag)), *rest, *kept, f"{MARK}{name}"]


def taken(words: Sequence[str]) -> tuple[list[str], str | None]:
    """The words without the mark that `expanded` left, and the experiment's name."""
    names = [w.removeprefix(MARK) for w in words if w.startswith(MARK)]
    return [w for w in words if not w.startswith(MARK)], names[0] if names else None


def _key(word: str) -> str:
    key = word.partition("=")[0]
    return ALIASES.get(key, key)


def _file(name: str) -> tuple[list[str], list[str]]:
    import yaml  # type: ignore[import-untyped]

    path = Path(FOLDER) / name / FILE
    if not name or not path.is_file():
        known = sorted(p.parent.name for p in Path(FOLDER).glob(f"*/{FILE}"))
        path = path if name else Path(FOLDER) / "NAME" / FILE
        guess = nearest(name, known)
        hint = f"did you mean experiment={guess}?" if guess else f"there are: {listed(known)}" if known else ""
        raise ConfigError(f"there is no {path}", hint or "run it in the folder that holds experiments/")
    try:
        body = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {str(error).splitlines()[0]}", "mend the file") from None
    if not isinstance(body, dict) or (unknown := sorted(set(body) - {"overrides", "flags"})):
        what = f"has {listed(unknown)}" if isinstance(body, dict) else "is not a mapping"
        raise ConfigError(f"{path} {what}", "it holds two plain lists, overrides: and flags:")
    return _words(body, "overrides", path), _words(body, "flags", path)


def _words(body: dict[str, Any], name: str, path: Path) -> list[str]:
    example = {"flags": "--seeds 2", "overrides": "norm=rmsnorm,layernorm"}[name]
    hint = f"write a line for each under {name}:, as `- {example}`"
    found = body.get(name) or []
    if name == "flags" and isinstance(found, list):  # `[--seeds, 2]` reads as well as `--seeds 2`
        found = [str(w) if isinstance(w, int) else w for w in found]
    if not isinstance(found, list) or not all(isinstance(w, str) for w in found):
        raise ConfigError(f"`{name}` of {path} is not a list of words", hint)
    wrong = [w for w in found if w.startswith("-")] if name == "overrides" else []
    if name == "flags" and found and not found[0].startswith("--"):
        wrong = found[:1]
    if wrong:
        raise ConfigError(f"`{name}` of {path} holds {listed(wrong)}", hint)
    return found
