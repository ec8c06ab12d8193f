"""`lmlab options [GROUP]`: what can be chosen and set, from the catalogue and the specs; no torch, no Hydra."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from lmlab.config.catalogue import Entry
    from lmlab.config.fields import Field

NODE_HELP = {
    "train": "how much to train and how often to look",
    "seed": "seed=3 sets every seed; or one by one",
    "init": "what the weights start from",
    "wandb": "Weights & Biases",
    "paths": "where things are written",
}


def register(app: typer.Typer) -> None:
    app.command(
        "options", epilog="Examples: lmlab options · lmlab options attn · lmlab options gqa · lmlab options train"
    )(options)


def options(
    words: Annotated[
        Optional[list[str]],
        typer.Argument(
            metavar="[GROUP] [plugins=[FILE.py]]", help="a group, an option, train, seed, wandb, … or a key"
        ),
    ] = None,
    config_dir: Annotated[
        Optional[str], typer.Option("--config-dir", metavar="DIR", help="a conf/ folder of your own")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON on stdout")] = False,
) -> None:
    """What can be chosen: every group with its options; with GROUP their fields, defaults, bounds and words."""
    import json

    from lmlab.config.catalogue import user_conf
    from lmlab.errors import LmlabError

    words = words or []
    _import_plugins([w for w in words if w.startswith("plugins=")])
    names = [w for w in words if not w.startswith("plugins=")]
    if len(names) > 1:
        raise LmlabError(
            f"`lmlab options` takes one name, and was given {' '.join(names)}", f"lmlab options {names[0]}"
        )
    user = user_conf(config_dir)
    sheet = describe(names[0], user) if names else {"groups": groups(user), "settings": settings()}
    if as_json:
        print(json.dumps(sheet))
    elif names:
        _print_sheet(sheet)
    else:
        _print_all(sheet)


def _import_plugins(words: list[str]) -> None:
    from lmlab.config.plugins import import_plugins
    from lmlab.errors import raise_all

    for word in words:
        _, errors = import_plugins([f.strip() for f in word.partition("=")[2].strip("[]").split(",") if f.strip()])
        raise_all(errors)


# ---------------------------------------------------------------- the facts, as plain dicts


def groups(user: Path | None) -> list[dict[str, Any]]:
    """Every group: its options with their help, and which one is the default."""
    from lmlab.config.catalogue import PRESET, defaults, entries
    from lmlab.config.tree import GROUPS

    chosen = defaults()
    return [
        {"group": g, "default": chosen.get(g), "options": [_option(e) for e in _ordered(entries(g, user))]}
        for g in (*GROUPS, PRESET)
    ]


def _ordered(known: dict[str, Entry]) -> list[Entry]:
    """By name; sizes of a model from small to large."""

    def size(entry: Entry) -> int:
        return entry.values.get("n_layers", 0) * entry.values.get("d_model", 0) ** 2

    return sorted(known.values(), key=lambda e: (size(e), e.label))


def _option(entry: Entry) -> dict[str, Any]:
    own = entry.spec.name if entry.spec is not None else None
    builds_on = own if own != entry.label and entry.group != "model" else None
    return {
        "name": entry.label,
        "help": entry.help,
        "builds_on": builds_on,
        "sets": entry.values or entry.selects,
        "fields": [f["key"] for f in fields_of(entry)],
    }


def fields_of(entry: Entry, *, own: bool = True) -> list[dict[str, Any]]:
    """The fields of a part, with the entry's own values as defaults, or with those of its spec."""
    from lmlab.config.fields import fields

    if entry.spec is None:
        return []
    part = entry.make()
    found = fields(entry.spec)
    return [_field(f"{entry.group}.{n}", f, getattr(part, n) if own else f.default) for n, f in found.items()]


def _field(key: str, field: Field, default: Any) -> dict[str, Any]:
    return {
        "key": key,
        "default": default,
        "takes": field.allowed(),
        "help": field.help,
        "choices": list(field.choices),
    }


def settings() -> dict[str, list[dict[str, Any]]]:
    """The plain nodes and keys of the root, by node; "" holds the keys that stand alone."""
    from lmlab.config.catalogue import nodes
    from lmlab.config.fields import fields
    from lmlab.config.tree import Experiment

    found = {n: [_field(f"{n}.{k}", f, f.default) for k, f in fields(cls).items()] for n, cls in nodes().items()}
    return found | {"": [_field(n, f, f.default) for n, f in fields(Experiment).items() if f.node is None]}


def describe(word: str, user: Path | None) -> dict[str, Any]:
    """The sheet of a group, an option, a node or one key. Raises LmlabError with the nearest name."""
    from lmlab.config.catalogue import PRESET, defaults, entries
    from lmlab.config.tree import GROUPS
    from lmlab.errors import LmlabError, nearest

    word = {"lr": "optim.lr", "seed.all": "seed"}.get(word, word.rstrip("=."))
    group, _, label = word.partition("=")
    rest = settings()
    if group in (*GROUPS, PRESET):
        return _group_sheet(group, label or None, user)
    if word in rest:
        return {"group": word, "help": NODE_HELP.get(word, ""), "options": [], "fields": rest[word]}
    owners = [g for g in (*GROUPS, PRESET) if word in entries(g, user)]
    if owners:
        return _group_sheet(owners[0], word, user)
    keys = {f["key"]: f for sheet in rest.values() for f in sheet}
    for group in GROUPS:
        for entry in _default_first(entries(group, user), defaults()[group]):
            keys = {f["key"]: f for f in fields_of(entry)} | keys
    hits = [f for k, f in keys.items() if word in (k, k.rpartition(".")[2])]
    if hits:
        return {"group": word, "help": "", "options": [], "fields": hits}
    guess = nearest(word, [*GROUPS, PRESET, *rest, *keys, *(k.rpartition(".")[2] for k in keys)])
    hint = f"did you mean `lmlab options {guess}`?" if guess else "`lmlab options` lists everything"
    raise LmlabError(f"`{word}` is no group, option or key", hint)


def _default_first(known: dict[str, Entry], default: str | None) -> list[Entry]:
    """The default, then parts under their own name, then those built on them."""
    return sorted(known.values(), key=lambda e: (e.label != default, e.spec is not None and e.spec.name != e.label))


def _group_sheet(group: str, label: str | None, user: Path | None) -> dict[str, Any]:
    from lmlab.config.catalogue import defaults, entries
    from lmlab.errors import LmlabError, listed, nearest

    known = entries(group, user)
    if label is not None and label not in known:
        guess = nearest(label, known)
        hint = f"did you mean {group}={guess}?" if guess else f"`lmlab options {group}` shows them"
        raise LmlabError(f"`{group}={label}` is not known; choices: {listed(known, 20)}", hint)
    shown = [known[label]] if label else _ordered(known)
    default = defaults().get(group)
    merged: dict[str, dict[str, Any]] = {}
    for entry in _default_first({e.label: e for e in shown}, default):
        for facts in fields_of(entry, own=label is not None):
            merged.setdefault(str(facts), facts | {"only": []})["only"].append(entry.label)
    order = list(dict.fromkeys(f["key"] for f in merged.values()))
    fields = sorted(merged.values(), key=lambda f: order.index(f["key"]))
    for facts in fields:
        facts["only"] = [] if len(facts["only"]) == sum(e.spec is not None for e in shown) else facts["only"]
    return {"group": group, "default": default, "options": [_option(e) for e in shown], "fields": fields}


# ---------------------------------------------------------------- on the screen


def _print_all(sheet: dict[str, Any]) -> None:
    from lmlab.config.fields import show

    out = _Page()
    for group in sheet["groups"]:
        out.title(group["group"], "a named combination of parts" if group["group"] == "preset" else "")
        out.rows([_option_row(o, group["default"]) for o in group["options"]])
    for node, keys in sheet["settings"].items():
        out.title(node or "also", NODE_HELP.get(node, ""))
        out.rows([(f"  {f['key']}={show(f['default'])}", f["help"]) for f in keys])
    out.note("● is the default. Write group=option or key=value; `lmlab options GROUP` shows an option's fields.")


def _option_row(option: dict[str, Any], default: str | None) -> tuple[str, str]:
    return f"{'●' if option['name'] == default else ' '} {option['name']}", option["help"]


def _of_which(only: list[str] | None, names: list[str]) -> str:
    """` (gqa only)` or ` (not mla)`, whichever is shorter; nothing for a field that all options have."""
    if not only:
        return ""
    others = [name for name in names if name not in only]
    return f" (not {', '.join(others)})" if len(others) < len(only) else f" ({', '.join(only)} only)"


def _print_sheet(sheet: dict[str, Any]) -> None:
    from lmlab.config.fields import show

    out, group = _Page(), sheet["group"]
    options = sheet["options"]
    out.title(group, f"write {group}=NAME" if options else sheet["help"])
    out.rows([_option_row(o, sheet["default"]) for o in options])
    parts = [o for o in options if o["builds_on"] or group in ("model", "preset")]
    if made := [(f"  {group}={o['name']}", _made_of(o)) for o in parts if o["sets"]]:
        out.title("made of")
        out.rows(made)
    if sheet["fields"]:
        out.title("fields", "key=default · what it takes · what it is")
        rows = []
        for facts in sheet["fields"]:
            text = facts["help"] + _of_which(facts.get("only"), [o["name"] for o in options])
            rows.append((f"  {facts['key']}={show(facts['default'])}", facts["takes"], text))
        out.rows(rows)
    elif options and group != "preset":
        out.note("no fields")


def _made_of(option: dict[str, Any]) -> str:
    from lmlab.config.fields import show

    sets = " ".join(f"{k}={show(v)}" for k, v in option["sets"].items())
    return f"{option['builds_on']} with {sets}" if option["builds_on"] else sets


class _Page:
    """Titles and aligned rows: coloured and wrapped on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console

        console = Console(highlight=False)
        self.console = console if console.is_terminal else Console(highlight=False, width=10_000)
        self.first = True

    def title(self, name: str, help: str = "") -> None:
        from rich.text import Text

        if not self.first:
            self.console.print()
        self.first = False
        self.console.print(Text.assemble((name, "bold cyan"), "  " if help else "", (help, "dim")))

    def rows(self, rows: Sequence[tuple[str, ...]]) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        styles = ["bold", *[""] * 5]
        for i in range(max((len(r) for r in rows), default=0)):
            table.add_column(no_wrap=i == 0, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell, style) for cell, style in zip(row, styles, strict=False)))
        if self.console.is_terminal:
            self.console.print(table)
        else:
            self.plain(rows)

    def plain(self, rows: Sequence[tuple[str, ...]]) -> None:
        widths = [max(len(r[i]) for r in rows) for i in range(max((len(r) for r in rows), default=0))]
        for row in rows:
            print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=False)).rstrip())

    def note(self, text: str) -> None:
        from rich.text import Text

        self.console.print(Text(f"\n{text}", "dim"))
