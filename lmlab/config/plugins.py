"""Parts of your own: `plugins=[my_attn.py]` imports the file under its own name; what it defines is read or checked.

The name is the file's own so that workers can unpickle its classes, and its folder comes last on the path so that
nothing is hidden by it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING
from pathlib import Path

from lmlab.config.fields import fields, problem
from lmlab.config.tree import GROUPS
from lmlab.errors import ConfigError, Errors, LmlabError, listed, raise_all
from lmlab.registry import OPTIONS, Spec

SOURCE = "__lmlab_source__"  # set on a plug-in's module: the text it was made from


def parts_in(path: Path) -> list[tuple[str, str]]:
    """(group, name) of every `@option("group", "name", ...)` in a file, which is read and never run."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    found = []
    for node in ast.walk(tree):
        for call in node.decorator_list if isinstance(node, ast.ClassDef) else []:
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("option"):
                words = [a.value for a in call.args if isinstance(a, ast.Constant)]
                found += [(str(words[0]), str(words[1]))] if len(words) >= 2 else []
    return found


def import_plugins(paths: Sequence[str]) -> tuple[dict[str, str], list[LmlabError]]:
    """Import each file under its own name. Returns its source by file name, and what went wrong."""
    sources: dict[str, str] = {}
    errors: list[LmlabError] = []
    for path in paths:
        try:
            sources[Path(path).name] = _import(Path(path).expanduser())
        except Errors as several:
            errors += several.errors
        except ConfigError as error:
            errors.append(error)
    return sources, errors


def _import(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"`plugins` names {path}, which is not a file here", "give the path of a .py file")
    path, stem = path.resolve(), path.stem
    if path.suffix != ".py" or not stem.isidentifier():
        raise ConfigError(f"`plugins` names {path.name}, which Python can't import", "name it like my_attn.py")
    source = _source(path)
    if getattr(sys.modules.get(stem), SOURCE, None) != source:
        _refuse_taken(stem, path)
        _reachable(path.parent)
        before = {id(c) for options in OPTIONS.values() for c in options.values()}
        _run(stem, path, source)
        _check_parts([c for o in OPTIONS.values() for c in o.values() if id(c) not in before], path)
    return source


def _source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} can't be read: {error}", "give a Python file in UTF-8") from None


def _refuse_taken(stem: str, path: Path) -> None:
    """Hide no other program's module. A copy of the plug-in elsewhere (a run keeps one) is no such thing."""
    try:
        spec = importlib.util.find_spec(stem)
    except (ImportError, ValueError):
        spec = None
    origin = getattr(spec, "origin", None)
    ours = hasattr(sys.modules.get(stem), SOURCE) or origin == str(path)
    if (spec is None and stem not in sys.modules) or ours or (origin and parts_in(Path(origin))):
        return
    raise ConfigError(f"`plugins` names {path.name}, but Python already has a module {stem}", "rename the file")


def _reachable(folder: Path) -> None:
    """Workers that unpickle its classes must find the module; it comes last so that it hides nothing."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(folder) not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, known), str(folder)])
    importlib.invalidate_caches()


def _run(stem: str, path: Path, source: str) -> None:
    """Import this very file under its own name, in place of an earlier copy."""
    spec = importlib.util.spec_from_file_location(stem, path)
    assert spec is not None
    earlier, module = sys.modules.get(stem), importlib.util.module_from_spec(spec)
    sys.modules[stem] = module
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
        setattr(module, SOURCE, source)
    except BaseException as error:
        sys.modules.pop(stem)
        if earlier is not None:
            sys.modules[stem] = earlier
        if isinstance(error, ConfigError) or not isinstance(error, Exception):
            raise
        line = _line_in(error, path)
        raise ConfigError(
            f"{path.name}{line} can't be imported: {type(error).__name__}: {error}", "mend the file; --debug shows more"
        ) from error


def _line_in(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError) and error.lineno:
        return f", line {error.lineno},"
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f", line {line}," if line else ""


def _check_parts(found: list[type[Spec]], path: Path) -> None:
    """Parts that could not be composed or built are told now, and taken out of the catalogue again."""
    if not found:
        hint = 'put @option("attn", "my_attn", build="my_attn:MyAttn") over its spec'
        raise ConfigError(f"{path.name} defines no part", hint)
    wrong = [(f"{path.name}: {spec.of_group}={spec.name}", *w) for spec in found for w in _part_errors(spec, path)]
    if wrong:
        for spec in found:
            del OPTIONS[spec.of_group][spec.name]
        raise_all([ConfigError(f"{part} {message}", hint) for part, message, hint in wrong])


def _part_errors(spec: type[Spec], path: Path) -> Iterator[tuple[str, str]]:
    """What is wrong with one part: message and hint."""
    if spec.of_group not in GROUPS:
        yield "belongs to no group", f"use one of {listed(GROUPS, 20)}"
    if not issubclass(spec, Spec):
        yield "is not a Spec", "derive the class from lmlab.registry.Spec or from its group's spec"
    module, _, attribute = spec.build.partition(":")
    if module == path.stem and not hasattr(sys.modules[module], attribute):
        yield f"is built by {spec.build}, which is not in the file", "name the class after the colon"
    try:
        known = fields(spec).values()
    except (NameError, TypeError) as error:
        yield f"has a field whose type can't be read: {error}", "import the names that its annotations use"
        return
    for field in known:
        if not set(field.types) <= {int, float, bool, str}:
            yield (
                f"has a field {field.name} of a type that can't be typed",
                "use int, float, bool, str, or a list of one",
            )
        elif field.default is MISSING:
            yield f"has a field {field.name} without a default", "give one: every option composes by its name alone"
        elif text := problem(field.default, field):
            yield f"has a field {field.name} whose default {text}", "give another default, or other bounds"
