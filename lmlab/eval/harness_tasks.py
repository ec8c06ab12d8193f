"""Which tasks `--tasks` names, and the files they stand in: read, never run.

A task file may bring Python of its own (`!function`), or prompts of a package that runs them (`use_prompt`): files that
lm_eval ships may, those of others are refused.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lmlab.errors import ConfigError, DataError, listed

PREFIX = "lm_eval:"
ENDINGS = (".yaml", ".yml")
PLAIN = "tag:yaml.org,2002:"
CODE = ("use_prompt",)
SHAPES: dict[str, tuple[str, type]] = {
    "metric_list": ("[{metric: acc}]", list),
    "filter_list": ("[{name: first, filter: [{function: take_first}]}]", list),
    "generation_kwargs": ('{until: ["\\n"]}', dict),
    "dataset_kwargs": ("{data_files: {test: questions.jsonl}}", dict),
}


def named(words: str) -> list[str]:
    """`lm_eval:a,lm_eval:b.yaml` → a, b.yaml. Raises ConfigError."""
    found = [word.strip() for word in words.split(",") if word.strip()]
    if not found:
        raise ConfigError("`--tasks` names none", f"write --tasks {PREFIX}NAME[,{PREFIX}NAME]")
    for word in found:
        if not word.startswith(PREFIX) or word == PREFIX:
            name = word.removeprefix(PREFIX) or "NAME"
            raise ConfigError(
                f"`--tasks` {word}: lmlab has no task of that name",
                f"a task of lm_eval is named {PREFIX}{name}, a task file {PREFIX}FILE.yaml",
            )
    found = [word.removeprefix(PREFIX) for word in found]
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"`--tasks` names {PREFIX}{twice} twice", "name it once")
    return found


def is_file(name: str) -> bool:
    """A file is told by its ending."""
    return name.endswith(ENDINGS)


def manager_of(names: Sequence[str]) -> Any:
    """lm_eval's TaskManager. Its index of 14,000 shipped tasks takes seconds, and is left out when no name needs it.

    Raises ConfigError for a name it has not, DataError or ConfigError for a file that can't be used.
    """
    from lm_eval.tasks import TaskManager

    for name in names:
        if is_file(name):
            read(Path(name))
    manager = TaskManager(include_defaults=not all(map(is_file, names)))
    for name in names:
        if not is_file(name) and name not in manager.task_index:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3, cutoff=0.6)
            hint = f"did you mean {', '.join(PREFIX + n for n in near)}?" if near else "`lm-eval ls tasks` lists them"
            raise ConfigError(f"`--tasks` {PREFIX}{name}: lm_eval has no such task", hint)
    return manager


def read(path: Path, *, seen: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """What a task file and those it includes say. Raises DataError, and ConfigError for one that brings code."""
    path = path.expanduser().resolve()
    if path in seen:
        raise DataError(f"{path} includes itself", "take the include out")
    try:
        text = path.read_text(encoding="utf-8")
        _refuse_code(yaml.compose(text, Loader=yaml.SafeLoader), path)
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        first = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise DataError(f"the task file {path} can't be read: {first}", "see how lm_eval writes one") from error
    if isinstance(content, dict) and "group" in content:  # which lm_eval finds by name only
        raise ConfigError(f"{path} is a group of tasks, not a task", f"name its tasks: {PREFIX}A,{PREFIX}B.yaml")
    if not isinstance(content, dict) or not (seen or isinstance(content.get("task"), str)):  # an included one need not
        raise DataError(f"{path} is no task: it has no key task", "see how lm_eval writes one")
    _refuse_shapes(content, path)
    includes = content.get("include") or []
    includes = includes if isinstance(includes, list) else [includes]
    return [content, *(c for name in includes for c in read(path.parent / str(name), seen=(*seen, path)))]


def _refuse_shapes(content: dict[str, Any], path: Path) -> None:
    """Raises DataError for a setting of another shape than lm_eval's: its own errors do not name the key."""
    for key, (example, kind) in SHAPES.items():
        value = content.get(key)
        if value is None or (isinstance(value, dict) if kind is dict else _is_list_of_mappings(value)):
            continue
        what = "mapping" if kind is dict else "list of mappings"
        raise DataError(f"the task file {path}: `{key}` is {value!r}, which is no {what}", f"write {key}: {example}")


def _is_list_of_mappings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def mending(names: Sequence[str], what: str = "lm_eval can't use what it says") -> str:
    """A hint on errors of tasks that come from these task files, or from lm_eval's own."""
    files = [name for name in names if is_file(name)]
    if not files:
        return "the task is lm_eval's own: see its documentation; --debug shows where"
    return f"mend the task file {' or '.join(files)}: {what}; --debug shows where"


def source(path: Path) -> dict[str, str]:
    """Where a task is written, and the hash of that file."""
    digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    return {"file": str(path), "file_hash": digest}


def refuse_running_code(tasks: dict[str, Any]) -> None:
    """Raises ConfigError for tasks that run what a model wrote, show it pictures, or are scored by code of the hub."""
    for name, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False):
            raise ConfigError(
                f"{PREFIX}{name} runs the code that a model writes", "lmlab runs none: leave the task out"
            )
        if getattr(task, "MULTIMODAL", False):
            raise ConfigError(
                f"{PREFIX}{name} shows pictures or sounds", "lmlab's models read text: leave the task out"
            )
        functions = getattr(task, "_metric_fn_list", {})
        lost = [metric for metric, function in functions.items() if function is None]
        if lost and getattr(task.config, "process_results", None) is None:
            raise ConfigError(
                f"{PREFIX}{name} is scored by {listed(lost)}, which lm_eval has not: it would run code of the hub",
                "use one of lm_eval's own metrics",
            )


def _refuse_code(node: Any, path: Path) -> None:
    """Raises ConfigError for a tag that is not YAML's own, and for a key whose value is code."""
    if node is None:
        return
    if not node.tag.startswith(PLAIN) or node.tag.startswith(PLAIN + "python"):
        said = f"{node.tag} {node.value}" if isinstance(node.value, str) else node.tag
        raise _code(path, said)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value in CODE:
                raise _code(path, f"{key.value}: {value.value}")
            _refuse_code(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _refuse_code(child, path)


def _code(path: Path, said: str) -> ConfigError:
    return ConfigError(
        f"the task file {path} brings code, which is not run: {said}",
        "write it as a template: doc_to_text: '{{question}}', process the data beforehand",
    )
