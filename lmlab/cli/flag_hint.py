"""What a flag that a command has not was meant as: one of its own flags, or a key that it takes."""

from __future__ import annotations

import difflib
import importlib
import re
from typing import Any

from lmlab.cli.commands import MODULES, module

CLOSE = 0.7  # of a misspelling


def flag_hint(word: str, context: Any, written: str) -> str:
    """The hint, or "" when nothing is like it. word: as typed; written: how the key of that name is written, if there
    is one (`write model.n_layers=3, without dashes`)."""
    own = _flags(context)
    bare = word.split("=")[0].lower().replace("_", "-")
    parts = [part for part in bare.strip("-").split("-") if len(part) > 2]
    misspelt = difflib.get_close_matches(bare, own, n=1, cutoff=CLOSE)
    key = written if _takes(context, written) else ""
    shared = [flag for flag in own if set(parts) & set(flag.strip("-").split("-"))]
    about = [flag for flag, help in own.items() if set(parts) & set(re.findall(r"[a-z]+", help)[:2])]
    if misspelt:
        return f"did you mean {misspelt[0]}?"
    return key or next((f"did you mean {flag}?" for flag in (*shared, *about)), "")


def _flags(context: Any) -> dict[str, str]:
    """The command's flags with what their help says, in lower case."""
    params = [] if context is None else context.command.params
    return {o: (getattr(p, "help", None) or "").lower() for p in params for o in p.opts if o.startswith("--")}


def _takes(context: Any, written: str) -> bool:
    """Whether the command takes the key that is written."""
    if context is None or not written:
        return bool(written)
    arguments = [p for p in context.command.params if p.param_type_name == "argument"]
    if not any("=" in (p.metavar or "") for p in arguments):
        return False
    name = context.command_path.split()[1]
    only = getattr(importlib.import_module(f"lmlab.cli.{module(name)}"), "MAY_SET", None) if name in MODULES else None
    named = re.match(r"write ([\w.]+)=", written)
    key = named[1] if named else ""
    return only is None or any(key == one or key.startswith(f"{one}.") for one in only)
