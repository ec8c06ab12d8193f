"""What can follow at the cursor: answers `lmlab _complete`, at every TAB, without importing torch, Hydra or typer.

Commands, flags, `norm=rm`, `attn.n_`, `pos=rope,al`, the words a field takes, names of parts in `plugins=[...]` (their
files are read, never run).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from lmlab.cli.commands import EVERYWHERE, MODULES, OVERRIDES, command
from lmlab.errors import LmlabError

SHELLS = ("bash", "zsh", "fish")
ALIASES = ("lr", "seed")
FLAG_VALUES = {"--split": ("val", "test"), "--resume": ("auto",), "--from": ()}
FLAG_VALUES |= {"--dtype": ("float32", "bfloat16"), "--bos": ("always", "empty")}
FLAG_VALUES |= {"--format": ("terminal", "md", "html", "csv", "json", "svg", "pdf")}
FLAG_LISTS = ("--rope-scaling", "--tasks")  # words with commas between


def answer(words: Sequence[str]) -> int:
    """Print the candidates for $COMP_LINE up to $COMP_POINT, one a line, as the shell wants them."""
    shell = words[0] if words else "bash"
    line = os.environ.get("COMP_LINE", "")
    point = os.environ.get("COMP_POINT", "")
    line = line[: int(point)] if point.isdigit() else line
    *before, current = split(line)
    try:
        found = sorted(set(candidates(before[1:], current)))
    except (LmlabError, OSError):
        found = []
    if shell == "bash":
        cut = max(current.rfind("="), current.rfind(":")) + 1
        found = [c[cut:] for c in found]
    sys.stdout.write("".join(f"{c}\n" for c in found))
    return 0


def split(line: str) -> list[str]:
    """The words of a line; the last is the one being typed, empty after a space. Quotes are taken off."""
    words: list[str] = []
    word = quote = ""
    for character in line:
        if quote:
            quote, word = ("", word) if character == quote else (quote, word + character)
        elif character in "'\"":
            quote = character
        elif character.isspace():
            words, word = ([*words, word] if word else words), ""
        else:
            word += character
    return [*words, word] if words or word else ["lmlab", ""]


def candidates(before: Sequence[str], current: str) -> list[str]:
    """Whole words that may stand at the cursor, given the words between `lmlab` and it."""
    if not before:
        return _starting((*MODULES, *EVERYWHERE, "--version") if current.startswith("-") else MODULES, current)
    name, rest = before[0], list(before[1:])
    if name not in MODULES:
        return []
    known = command(name)
    if known.subcommands and not rest:
        return _starting(known.subcommands, current)
    known = known.subcommands.get(rest[0], known) if rest else known
    if current.startswith("-"):
        return _starting((f for f in known.flags if f not in rest), current)
    if rest and rest[-1] in known.flags and rest[-1] in FLAG_LISTS:
        done = current.rpartition(",")[0] + "," if "," in current else ""
        return _starting([done + word for word in _listed(rest[-1])], current)
    if rest and rest[-1] in known.flags and rest[-1] in FLAG_VALUES:
        runs = _runs(rest) if rest[-1] in ("--resume", "--from") else []
        return _starting([*FLAG_VALUES[rest[-1]], *runs], current)
    if rest and rest[-1] == "--config-dir":
        return _folders(current)
    return _starting(_arguments(name, rest, current), current)


def _listed(flag: str) -> list[str]:
    from lmlab.config import tree  # noqa: F401  # fills OPTIONS
    from lmlab.data.spec import TaskSpec
    from lmlab.registry import OPTIONS

    if flag == "--rope-scaling":
        return ["own", *OPTIONS["rope_scaling"]]
    return [name for name, spec in OPTIONS["data"].items() if issubclass(spec, TaskSpec)]


def _starting(words: Iterable[str], current: str) -> list[str]:
    return [w for w in words if w.startswith(current)]


def _arguments(name: str, rest: list[str], current: str) -> Iterable[str]:
    """What a command takes besides flags."""
    if name == "completion":
        return SHELLS
    if name in ("options", "new"):
        from lmlab.config.tree import GROUPS

        if name == "new":
            return ("norm", "block", "pos", "attn", "ffn") if not rest else ()
        return (*GROUPS, "preset", "train", "seed", "init", "wandb", "paths", "compile", "device", "name", "plugins")
    runs = _runs(rest) if name in ("eval", "report", "verify", "runs", "export") and "=" not in current else []
    runs += _folders(current) if name == "import" and not rest else []
    runs += _sweeps(rest) if name == "report" and "=" not in current else []
    if current.startswith("init.run="):
        done = current.rpartition(",")[0] + "," if "," in current else "init.run="
        return [done + run for run in _runs(rest)]
    if name == "sweep":
        return [*_of_sweeps(), *Line(rest, current).overrides()]
    if name in OVERRIDES or (name == "data" and rest[:1] == ["prepare"]):
        return [*runs, *Line(rest, current).overrides()]
    return runs


def _runs(rest: Sequence[str]) -> list[str]:
    """Names of run directories."""
    return [p.parent.name for p in _root(rest).glob("*/config.yaml")]


def _sweeps(rest: Sequence[str]) -> list[str]:
    """Names of sweep directories."""
    return [p.parent.name for p in _root(rest).glob("sweeps/*/sweep.json")]


def _of_sweeps() -> list[str]:
    """Words that only a sweep takes."""
    found = [f"experiment={p.parent.name}" for p in Path("experiments").glob("*/sweep.yaml")]
    found += [f"hydra/launcher={name}" for name in ("local", "basic", "joblib", "submitit_local")]
    return [*found, "hydra/sweeper=optuna"]


def _root(rest: Sequence[str]) -> Path:
    """The folder of runs that the line names, else the default one."""
    return Path(next((w.partition("=")[2] for w in rest if w.startswith("paths.runs=")), "runs"))


def _folders(current: str) -> list[str]:
    head = current.rpartition("/")[0]
    return [f"{p}/" for p in Path(head or ".").glob("*") if p.is_dir() and str(p).startswith(current)]


class Line:
    """Overrides: what is on the line already, and what may stand at the cursor."""

    def __init__(self, rest: Sequence[str], current: str) -> None:
        self.current = current
        self.chosen = {w.partition("=")[0]: w.partition("=")[2] for w in rest if "=" in w}
        folder = Path(rest[rest.index("--config-dir") + 1]) if "--config-dir" in rest[:-1] else Path("conf")
        self.user = folder if folder.is_dir() else None

    def overrides(self) -> list[str]:
        key, equals, value = self.current.partition("=")
        if equals:
            return self.values(key, value)
        return self.fields(key) if "." in key else self.keys(key)

    def keys(self, typed: str) -> list[str]:
        """`norm=`, `train.`, `compile=`; a group typed in full also opens its fields: `attn.`."""
        from lmlab.config.catalogue import nodes
        from lmlab.config.fields import fields
        from lmlab.config.tree import GROUPS, Experiment

        plain = [n for n, f in fields(Experiment).items() if f.node is None]
        found = [f"{k}=" for k in (*GROUPS, "preset", *plain, *ALIASES) if k not in self.chosen]
        opened = [typed] if typed in GROUPS and self.parts(typed) else []
        return found + [f"{k}." for k in (*nodes(), *opened)]

    def fields(self, typed: str) -> list[str]:
        """`attn.n_kv_heads=`: fields of the option on the line, else of any option of the group."""
        head = typed.partition(".")[0]
        names = dict.fromkeys(n for part in self.parts(head) for n in part)
        return [f"{head}.{n}=" for n in names if f"{head}.{n}" not in self.chosen]

    def parts(self, head: str) -> list[list[str]]:
        """Field names of each dataclass that `head` may mean."""
        from lmlab.config.catalogue import entries, nodes
        from lmlab.config.fields import fields
        from lmlab.config.tree import GROUPS
        from lmlab.registry import OPTIONS

        if head in nodes():
            return [list(fields(nodes()[head]))]
        if head not in GROUPS:
            return []
        label = self.chosen.get(head)
        if label is not None and (own := self.plugin_fields(head, label)) is not None:
            return [own]
        if label is not None and label not in OPTIONS[head]:
            entry = entries(head, self.user).get(label)
            return [list(fields(entry.spec))] if entry and entry.spec else []
        return [list(fields(spec)) for name, spec in OPTIONS[head].items() if label in (None, name)]

    def values(self, key: str, value: str) -> list[str]:
        """`pos=rope,alibi`: the words that may follow the last comma."""
        done, comma, _ = value.rpartition(",")
        words = [w for w in self.words(key) if w not in done.split(",")]
        return [f"{key}={done}{comma}{w}" for w in words]

    def words(self, key: str) -> list[str]:
        from lmlab.config.catalogue import PRESET, labels, possible_fields
        from lmlab.config.tree import GROUPS

        if key == "plugins":
            from lmlab.config.plugins import parts_in

            return [f"[{p.name}]" for p in Path().glob("*.py") if parts_in(p)]
        if key in (*GROUPS, PRESET):
            return [*labels(key, self.user), *(n for p in self.plugins() for g, n in _parts(p) if g == key)]
        if key == "device":
            return ["auto", "cpu", "cuda"]
        found = [w for f in possible_fields(key) for w in (*f.choices, *(("true", "false") if bool in f.types else ()))]
        return list(dict.fromkeys(found))

    def plugins(self) -> list[Path]:
        """The files in `plugins=[...]`."""
        return [Path(f.strip()) for f in self.chosen.get("plugins", "").strip("[]").split(",") if f.strip()]

    def plugin_fields(self, group: str, label: str) -> list[str] | None:
        """Fields of a plug-in's part, by its annotations and its base class; None when no plug-in defines it."""
        import ast

        for path in self.plugins():
            if (group, label) not in _parts(path):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and re.search(rf"""["']{label}["']""", _decorators(node)):
                    own = [
                        a.target.id
                        for a in node.body
                        if isinstance(a, ast.AnnAssign) and isinstance(a.target, ast.Name)
                    ]
                    return [*_base_fields(ast.unparse(b) for b in node.bases), *own]
        return None


def _parts(path: Path) -> list[tuple[str, str]]:
    from lmlab.config.plugins import parts_in

    return parts_in(path)


def _decorators(node: object) -> str:
    import ast

    return " ".join(ast.unparse(d) for d in getattr(node, "decorator_list", []))


def _base_fields(bases: Iterable[str]) -> list[str]:
    """Fields of lmlab's own classes that a plug-in derives from."""
    from lmlab.config.fields import fields
    from lmlab.data import spec as data
    from lmlab.model import spec as model
    from lmlab.train import spec as train

    known = [getattr(m, b.rpartition(".")[2], None) for b in bases for m in (model, data, train)]
    return [n for cls in known if isinstance(cls, type) and hasattr(cls, "__dataclass_fields__") for n in fields(cls)]
