"""Which commands there are, and which flags each has, read from their files: completion must not import them."""

from __future__ import annotations

import ast
import keyword
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MODULES = (
    "train",
    "sweep",
    "eval",
    "generate",
    "report",
    "verify",
    "check",
    "bench",
    "import",
    "export",
    "options",
    "new",
    "runs",
    "data",
    "completion",
)
OVERRIDES = ("train", "sweep", "eval", "generate", "check", "import", "bench")  # commands that take key=value
EVERYWHERE = ("--help", "--debug")


@dataclass
class Command:
    """A command's flags, and its sub-commands by name."""

    flags: tuple[str, ...] = EVERYWHERE
    subcommands: dict[str, Command] = field(default_factory=dict)


def commands() -> dict[str, Command]:
    """Every command by name, in the order of `lmlab --help`."""
    return {name: command(name) for name in MODULES if source(name).is_file()}


def source(name: str) -> Path:
    """The file of a command."""
    return Path(__file__).with_name(f"{module(name)}.py")


def module(name: str) -> str:
    """Its module: a word of Python's own gets a dash at its end."""
    return f"{name}_" if keyword.iskeyword(name) else name


def command(name: str) -> Command:
    """What a command's file registers."""
    tree = ast.parse(source(name).read_text(encoding="utf-8"))
    functions = _functions(tree)
    named = {
        a.targets[0].id: a.value for a in tree.body if isinstance(a, ast.Assign) and isinstance(a.targets[0], ast.Name)
    }
    found = {
        label: Command((*_flags(functions[f], named), *EVERYWHERE)) for label, f in _registered(tree) if f in functions
    }
    nested = any(isinstance(n, ast.Attribute) and n.attr == "add_typer" for n in ast.walk(tree))
    return Command(EVERYWHERE, found) if nested else found.get(name, Command())


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Those of the file, and those it imports from another file of this folder."""
    found = {f.name: f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lmlab.cli."):
            other = ast.parse(source(str(node.module).rpartition(".")[2]).read_text(encoding="utf-8"))
            found = {f.name: f for f in ast.walk(other) if isinstance(f, ast.FunctionDef)} | found
    return found


def _registered(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(command, function) of `@app.command("x")` and of `app.command("x")(function)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            pairs = [(decorator, node.name) for decorator in node.decorator_list]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Name):
            pairs = [(node.func, node.args[0].id)]
        else:
            continue
        yield from ((label, name) for call, name in pairs if (label := _label(call, name)) is not None)


def _label(node: ast.AST, function: str) -> str | None:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "command"):
        return None
    named = [a.value for a in node.args if isinstance(a, ast.Constant)]
    named += [k.value.value for k in node.keywords if k.arg == "name" and isinstance(k.value, ast.Constant)]
    return str(named[0]) if named else function.replace("_", "-")


def _flags(function: ast.FunctionDef, named: dict[str, ast.expr]) -> Iterator[str]:
    """Each parameter made by typer.Option, here or in a named annotation: the names it gives, else its own."""
    arguments = [*function.args.args, *function.args.kwonlyargs]
    defaults = [None] * (len(function.args.args) - len(function.args.defaults)) + list(function.args.defaults)
    for argument, default in zip(arguments, [*defaults, *function.args.kw_defaults], strict=True):
        shared = named.get(argument.annotation.id) if isinstance(argument.annotation, ast.Name) else None
        for node in [n for part in (argument, default, shared) if part is not None for n in ast.walk(part)]:
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Option"):
                names = [a.value for a in node.args if isinstance(a, ast.Constant) and str(a.value).startswith("-")]
                yield from (part for n in names for part in str(n).split("/") if part.startswith("--"))
                if not names:
                    yield "--" + argument.arg.replace("_", "-")
