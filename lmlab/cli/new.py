"""`lmlab new GROUP NAME`: a working part of your own, spec and module in one file, with its test beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

GROUPS = ("norm", "block", "pos", "attn", "ffn")
TEMPLATES = Path(__file__).with_name("templates")


def register(app: typer.Typer) -> None:
    app.command("new", epilog="Example: lmlab new attn my_attn, then lmlab train plugins=\\[my_attn.py] attn=my_attn")(
        new
    )


def new(
    group: Annotated[str, typer.Argument(metavar="GROUP", help="|".join(GROUPS))],
    name: Annotated[str, typer.Argument(metavar="NAME", help="of the part and of its file, like my_attn")],
    folder: Annotated[str, typer.Option("--dir", metavar="DIR", help="where to write it")] = ".",
) -> None:
    """Write NAME.py and test_NAME.py: an example that trains as it stands, to change into your own idea."""
    _check(group, name)
    target = Path(folder)
    wanted = {target / f"{name}.py": f"{group}.py.txt", target / f"test_{name}.py": "test.py.txt"}
    _refuse_taken(group, name, target, list(wanted))
    for path, template in wanted.items():
        path.write_text(filled(template, group, name), encoding="utf-8")
        print(path)
    part = f"plugins=[{target / name}.py]" if target != Path() else f"plugins=[{name}.py]"
    typer.echo(
        f"next: lmlab train {part} {group}={name}   (python -m pytest {target / f'test_{name}.py'} tests it)", err=True
    )


def filled(template: str, group: str, name: str) -> str:
    """A template with the names put in."""
    from string import Template

    text = (TEMPLATES / template).read_text(encoding="utf-8")
    words = "".join(word.capitalize() for word in name.split("_"))
    return Template(text).substitute(group=group, name=name, Module=words, Spec=f"{words}Spec")


def _check(group: str, name: str) -> None:
    import keyword

    from lmlab.errors import LmlabError, listed, nearest

    if group not in GROUPS:
        guess = nearest(group, GROUPS)
        hint = f"did you mean `lmlab new {guess} {name}`?" if guess else f"use one of {listed(GROUPS)}"
        raise LmlabError(f"there is no template for a part of `{group}`", hint)
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name) or name != name.lower():
        raise LmlabError(f"`{name}` can't name a part", "use small letters, digits and _, like my_attn")


def _refuse_taken(group: str, name: str, target: Path, paths: list[Path]) -> None:
    """Nothing is overwritten; no built-in part and no module of Python is hidden."""
    from importlib.util import find_spec

    from lmlab.config.catalogue import entries
    from lmlab.errors import LmlabError

    if not target.is_dir():
        raise LmlabError(f"`--dir` names {target}, which is not a folder", f"mkdir -p {target}")
    if there := [str(p) for p in paths if p.exists()]:
        raise LmlabError(
            f"{' and '.join(there)} {'is' if len(there) == 1 else 'are'} here already",
            "choose another name: nothing is overwritten",
        )
    if name in entries(group):
        raise LmlabError(f"`{group}={name}` is one of lmlab's own", f"choose another name, like my_{name}")
    if find_spec(name) is not None:
        raise LmlabError(f"Python already has a module {name}", f"choose another name, like my_{name}")
