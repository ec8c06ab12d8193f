"""Tasks of lm_eval (EleutherAI's evaluation harness) on a model of ours: loaded, run, and their figures.

While they run nothing of the hub is executed, templates of task files can't reach Python, lm_eval's own prints go to
stderr, and with HF_HUB_OFFLINE=1 no connection is opened.
"""

from __future__ import annotations

import logging
import random
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partialmethod
from pathlib import Path
from typing import Any, Optional
from unittest import mock

import numpy as np

from lmlab.data.hub import NO_NETWORK, NOT_THERE
from lmlab.errors import ConfigError, DataError, LmlabError, in_one_line
from lmlab.eval.harness_tasks import PREFIX, is_file, manager_of, mending, refuse_running_code, source

UNVERSIONED = ("Yaml", "N/A")  # what lm_eval says of a task whose metadata has no version
DATA = "its data comes from the Hugging Face hub or its cache (HF_HUB_OFFLINE), or from data_files on this disk"
EXTRA = "pip install 'lmlab[lm-eval]'"


def require() -> str:
    """lm_eval's version. Raises ConfigError when the extra is not installed."""
    try:
        import lm_eval
    except ImportError as error:
        raise ConfigError("`--tasks lm_eval:…` needs lm_eval, which is not installed", EXTRA) from error
    return str(lm_eval.__version__)


def load(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Tasks by name or file, as lm_eval's `evaluate` takes them, for any number of models.

    Raises ConfigError for what is unknown, doubled or would run code, DataError for what is not there.
    """
    with _sealed():
        _seed()
        manager = manager_of(names)
        all_of: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
        for name in names:
            found = _loaded(manager, name)
            refuse_running_code(found["tasks"])
            twice = sorted(set(found["tasks"]) & set(all_of["tasks"]))
            if twice:
                raise ConfigError(f"two of `--tasks` are, or hold, the task {twice[0]}", "leave one out, or rename it")
            for key, known in all_of.items():
                known |= found.get(key) or {}
    return all_of


def run(lm: Any, loaded: dict[str, dict[str, Any]], *, limit: Optional[int] = None) -> dict[str, Any]:
    """Evaluate a HarnessModel on what `load` gave: {"tasks": {name: …}, "groups": {name: …}}, as `_told` has them.

    `limit`: documents of each task at most. Raises ConfigError, DataError.
    """
    from lm_eval.defaults import DEFAULT_OTHER_SEED
    from lm_eval.evaluator import evaluate

    tasks = loaded["tasks"]
    with _sealed():
        _seed()
        for task in tasks.values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
        try:
            found = evaluate(lm, loaded, limit=limit, log_samples=False)
        except LmlabError:
            raise
        except Exception as error:
            named = ", ".join(PREFIX + name for name in tasks)
            hint = mending([file for task in tasks.values() if (file := _written(task)) is not None])
            raise DataError(f"{named} can't be evaluated: {in_one_line(error)}", hint) from error
    groups = {name: {"figures": _figures(row, {})} for name, row in found.get("groups", {}).items()}
    return {"tasks": {name: _told(name, found, task, lm) for name, task in tasks.items()}, "groups": groups}


def _seed() -> None:
    """As lm_eval's own command does."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)


@contextmanager
def _sealed() -> Iterator[None]:
    """Around all that lm_eval does: what a task file or the hub brings is data, and stays it."""
    import datasets
    import lm_eval.utils
    from huggingface_hub import constants
    from jinja2 import BaseLoader, StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tqdm import tqdm  # type: ignore[import-untyped]

    datasets.disable_progress_bars()
    templates = ImmutableSandboxedEnvironment(
        loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True
    )
    templates.filters["regex_replace"] = lm_eval.utils.regex_replace
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(lm_eval.utils, "env", templates))
        stack.enter_context(_missing("evaluate"))  # its metrics are scripts of the hub
        stack.enter_context(_without_defaults())
        stack.enter_context(redirect_stdout(sys.stderr))
        stack.enter_context(mock.patch.object(tqdm, "__init__", partialmethod(tqdm.__init__, disable=True)))
        if constants.HF_HUB_OFFLINE:
            stack.enter_context(mock.patch.object(socket.socket, "connect", _refused_connection))
        yield


@contextmanager
def _missing(module: str) -> Iterator[None]:
    """Importing it fails. (`mock.patch.dict` would also take away all that is imported meanwhile.)"""
    before = sys.modules.get(module)
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]
        if before is not None:
            sys.modules[module] = before


@contextmanager
def _without_defaults() -> Iterator[None]:
    """lm_eval tells every run that a metric of a task is aggregated as that metric always is."""

    def news(record: logging.LogRecord) -> bool:
        return ". using default " not in record.getMessage()

    logger = logging.getLogger("lm_eval.api.task")
    logger.addFilter(news)
    try:
        yield
    finally:
        logger.removeFilter(news)


def _refused_connection(self: socket.socket, address: Any) -> None:
    raise ConnectionError(f"HF_HUB_OFFLINE=1, so nothing is asked of {address}")


def _loaded(manager: Any, name: str) -> dict[str, Any]:
    """lm_eval's TaskDict of a name or file. Raises DataError."""
    try:
        found: dict[str, Any] = manager.load([str(Path(name).expanduser()) if is_file(name) else name])
    except LmlabError:
        raise
    except Exception as error:  # of datasets, of the hub, of a module that the task needs
        hint = DATA if _of_missing_data(error) else mending([name])
        raise DataError(f"{PREFIX}{name} can't be loaded: {in_one_line(error)}", hint) from error
    return found


def _of_missing_data(error: BaseException | None) -> bool:
    """Whether data could not be found or fetched, at any place of what led to the error."""
    while error is not None:
        kinds = {cls.__name__ for cls in type(error).__mro__}
        if kinds & (NO_NETWORK | NOT_THERE | {"FileNotFoundError"}):
            return True
        error = error.__cause__ or error.__context__
    return False


def _written(task: Any) -> str | None:
    """The file that a task is written in, one of the user's or of lm_eval's."""
    metadata = task.config.metadata
    found = metadata.get("config_source") if isinstance(metadata, dict) else None
    return str(found) if found and Path(found).is_file() else None


def _told(name: str, found: dict[str, Any], task: Any, lm: Any) -> dict[str, Any]:
    """Of one task: version, documents, figures, what was cut off, and where it is written."""
    n = found["n-samples"][name]
    config = task.config
    written = _written(task)
    return {
        "version": None if (version := found["versions"].get(name)) in UNVERSIONED else version,
        "output_type": config.output_type,
        "n": n["effective"],
        "n_all": n["original"],
        "n_shots": found["n-shot"].get(name),
        "figures": _figures(found["results"][name], found["higher_is_better"].get(name) or {}),
        "requests": lm.requests[name],
        "cut_requests": lm.cut_requests[name],
        "cut_tokens": lm.cut_tokens[name],
        "dataset": {"path": config.dataset_path, "name": config.dataset_name},
        "generation_kwargs": config.generation_kwargs,
        **(source(Path(written)) if written is not None else {}),
    }


def _figures(row: dict[str, Any], higher_is_better: dict[str, Any]) -> list[dict[str, Any]]:
    """lm_eval's `acc,none` and `acc_stderr,none` as one entry each; a standard error that it can't tell is None."""
    figures = []
    for key, value in row.items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith("_stderr") or isinstance(value, str):
            continue
        stderr = row.get(f"{metric}_stderr,{chosen}")
        figure = {"metric": metric, "filter": chosen, "value": value}
        figure |= {"stderr": stderr if isinstance(stderr, float) else None}
        figures.append(figure | {"higher_is_better": higher_is_better.get(metric)})
    return figures
