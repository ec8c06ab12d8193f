"""What can be chosen: the files under conf/ joined with the specs they name. Hydra- and torch-free.

`lmlab options`, completion, hints and slugs read this; Hydra reads the same files when an experiment is composed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmlab.kernels.spec  # noqa: F401  (fills OPTIONS)
from lmlab.config.fields import fields
from lmlab.config.tree import GROUPS, Experiment
from lmlab.errors import ConfigError
from lmlab.registry import OPTIONS, Spec

PRESET = "preset"


@dataclass(frozen=True)
class Entry:
    """One choice of a group: `label` is what the user types; `spec` is None for a preset."""

    group: str
    label: str
    help: str
    path: Path | None = None
    spec: type[Spec] | None = None
    values: dict[str, Any] = field(default_factory=dict)
    selects: dict[str, str] = field(default_factory=dict)

    def make(self) -> Spec:
        """The part with this entry's values."""
        assert self.spec is not None, f"{self.group}={self.label} is not a part"
        known = fields(self.spec)
        return self.spec(**{k: _typed(v, known[k].types) for k, v in self.values.items() if k in known})


def _typed(value: Any, kinds: tuple[type, ...]) -> Any:
    """YAML 1.1 reads 6e-4 as a word and 1 as an int; Hydra's reader does not."""
    if isinstance(value, list):
        return [_typed(v, kinds) for v in value]
    if float in kinds and isinstance(value, (int, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def conf_dir() -> Path:
    """The catalogue that came with lmlab: `lmlab/conf` in a wheel, `conf` beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"lmlab's own `conf` folder is missing beside {package}", "reinstall lmlab")


def user_conf(config_dir: str | None = None) -> Path | None:
    """The user's own catalogue: `--config-dir`, else ./conf when there is one that is not lmlab's."""
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ConfigError(
                f"`--config-dir` names {config_dir}, which is not a folder", "give a folder of YAML files"
            )
        return Path(config_dir).resolve()
    folder = Path("conf")
    return folder.resolve() if folder.is_dir() and folder.resolve() != conf_dir() else None


def clashes(user: Path) -> list[ConfigError]:
    """A user's file with a built-in's name: Hydra would hide one of the two silently. Equal bytes do no harm."""
    own, errors = conf_dir(), []
    for path in sorted(user.rglob("*.yaml")):
        twin = own / path.relative_to(user)
        if twin.is_file() and twin.read_bytes() != path.read_bytes():
            name = path.relative_to(user)
            errors.append(
                ConfigError(
                    f"{user.name}/{name} has the name of lmlab's own {name}",
                    "rename it: a file of yours can't replace a built-in one",
                )
            )
    return errors


def entries(group: str, user: Path | None = None) -> dict[str, Entry]:
    """Every choice of a group by label: lmlab's files, the user's, and parts of imported plug-ins."""
    found = {label: read(path, group) for label, path in labels(group, user).items()}
    for name, spec in OPTIONS.get(group, {}).items():
        has_file = any(e.spec is spec for e in found.values())
        if name not in found and not has_file:
            found[name] = Entry(group, name, (spec.__doc__ or "").strip().split("\n")[0], spec=spec)
    return found


def labels(group: str, user: Path | None = None) -> dict[str, Path]:
    """The label and file of every choice of a group, without reading them: for completion."""
    found: dict[str, Path] = {}
    for folder in (conf_dir(), user):
        for path in sorted((folder / group).glob("*.yaml")) if folder else ():
            found.setdefault(path.stem, path)
    return found


def parsed(text: str) -> dict[str, Any]:
    """A YAML mapping, the caller's own; {} for anything else. Each text is parsed once a process."""
    return copy.deepcopy(_parsed(text))


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]

    try:
        body = yaml.safe_load(text)
    except yaml.YAMLError:
        body = {}
    return body if isinstance(body, dict) else {}


def read(path: Path, group: str) -> Entry:
    """One catalogue file. A part file may build on another one of its group."""
    text = path.read_text(encoding="utf-8", errors="replace")
    body = parsed(text)
    spec: type[Spec] | None = None
    values: dict[str, Any] = {}
    selects: dict[str, str] = {}
    for row in body.pop("defaults", None) or ():
        if isinstance(row, dict):
            selects.update({k.removeprefix("override ").lstrip("/").partition("@")[0]: v for k, v in row.items()})
        elif row != "_self_":
            spec, values = _base(row, path, group)
    return Entry(group, path.stem, help_of(text), path, spec, values | body, selects)


def _base(row: str, path: Path, group: str) -> tuple[type[Spec] | None, dict[str, Any]]:
    """The spec and values behind a line `- /spec/attn/gqa@_here_`, `- /attn/gqa@_here_` or `- gqa`."""
    parts = row.partition("@")[0].strip("/").split("/")
    if parts[0] == "spec" and len(parts) == 3:
        return OPTIONS.get(parts[1], {}).get(parts[2]), {}
    for folder in (path.parent, conf_dir() / group):
        other = folder / f"{parts[-1]}.yaml"
        if other.is_file() and other != path:
            base = read(other, group)
            return base.spec, dict(base.values)
    return None, {}


def help_of(text: str) -> str:
    """The first comment that is no package line of Hydra's: what `lmlab options` prints."""
    for line in text.splitlines():
        if line.startswith("#") and not line.startswith("# @"):
            return line.lstrip("# ").strip()
    return ""


def defaults() -> dict[str, str]:
    """The default label of every group, from conf/config.yaml."""
    rows = parsed((conf_dir() / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    return {k: v for row in rows if isinstance(row, dict) for k, v in row.items() if k in GROUPS}


def default_experiment() -> Experiment:
    """The default composition, without Hydra."""
    parts: dict[str, Any] = {group: entries(group)[label].make() for group, label in defaults().items()}
    return Experiment(**parts)


def nodes() -> dict[str, type]:
    """The plain nodes of the root (train, seed, …) and their dataclasses."""
    return {n: f.node for n, f in fields(Experiment).items() if n not in GROUPS and f.node is not None}


def keys_named(leaf: str) -> list[str]:
    """Every dotted key whose last word is `leaf`: n_layers → [model.n_layers]."""
    found = [f"{node}.{leaf}" for node, cls in nodes().items() if leaf in fields(cls)]
    for group in GROUPS:
        if any(leaf in fields(spec) for spec in OPTIONS[group].values()):
            found.append(f"{group}.{leaf}")
    return found


def possible_fields(key: str) -> list[Any]:
    """Every field `key` may mean, over the options of its group; [] for a key that is nowhere."""
    head, _, leaf = key.partition(".")
    if not leaf:
        found = fields(Experiment).get(head)
        return [found] if found is not None and head not in GROUPS and found.node is None else []
    owners = list(OPTIONS[head].values()) if head in GROUPS else [nodes()[head]] if head in nodes() else []
    return [fields(o)[leaf] for o in owners if leaf in fields(o)]
