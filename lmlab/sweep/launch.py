"""Hydra's side of a sweep: its launchers over the members that are open, its sweepers over a space they draw from.

`hydra/launcher=local`, the default, is lmlab's own: the pool of slots on this machine, under any sweeper.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher

from lmlab.config import catalogue
from lmlab.config.load import register
from lmlab.errors import ConfigError
from lmlab.sweep.space import LAUNCHER, SWEEPER, Space

LOCAL, PLUGINS = "local", "hydra_plugins"
# Hydra writes nothing of its own: no .hydra folders, no logs; what launchers need lies in the sweep's directory.
QUIET = (
    "hydra.output_subdir=null",
    "hydra/job_logging=disabled",
    "hydra/hydra_logging=disabled",
    "hydra.sweep.subdir=.",
)
Task = Callable[[Any], float]
RunAll = Callable[[list[list[str]]], list[float]]


class LocalLauncher(Launcher):
    """Hands each batch of a sweeper to the pool. `run_all` is set by `multirun`: words of each job → its losses."""

    __module__ = f"{PLUGINS}.lmlab"  # see `_register_local`
    run_all: ClassVar[RunAll]

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        """The pool's children compose for themselves."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        jobs = [list(words) for words in job_overrides]
        losses = type(self).run_all(jobs)
        found = []
        for words, loss in zip(jobs, losses, strict=True):
            one = JobReturn(overrides=words, status=JobStatus.COMPLETED)
            one.return_value = loss
            found.append(one)
        return found


def launcher(space: Space) -> str:
    return space.chosen(LAUNCHER) or LOCAL


def launch(space: Space, jobs: Sequence[Sequence[str]], task: Task, folder: Path, config_dir: str | None) -> None:
    """Run `jobs`, each a list of overrides, by the launcher that the space names. Raises what the launcher raises."""
    from hydra._internal.callbacks import Callbacks
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins
    from hydra.types import HydraContext

    with _hydra() as hydra, _told(space):
        config = _settled(hydra, space, _settings(folder, config_dir))
        loader = GlobalHydra.instance().config_loader()
        context = HydraContext(config_loader=loader, callbacks=Callbacks(config))
        made = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
        made.launch([list(words) for words in jobs], initial_job_idx=0)


def check(space: Space) -> None:
    """Raises ConfigError when Hydra does not know the launcher or sweeper, or a setting of it."""
    if space.hydra:
        with _hydra() as hydra, _told(space):
            _settled(hydra, space, [])


def _settled(hydra: Any, space: Space, settings: Sequence[str]) -> Any:
    """Hydra's own configuration of this sweep."""
    from hydra.types import RunMode

    words = [*space.hydra, *settings]
    return hydra.compose_config("config", words, run_mode=RunMode.MULTIRUN, with_log_configuration=False)


def multirun(space: Space, task: Task, folder: Path, run_all: RunAll, config_dir: str | None) -> Any:
    """The whole of Hydra's multirun: the sweeper that the space names chooses the members. Returns what it returns."""
    words = [str(o) for o in space.fixed] + space.drawn
    words += [f"{key}=" + ",".join(o.value for o in values) for key, values in space.axes.items()]
    chosen = [*space.hydra, *([] if space.chosen(LAUNCHER) else [f"{LAUNCHER}={LOCAL}"])]
    LocalLauncher.run_all = staticmethod(run_all)
    _quiet_optuna()
    with _hydra() as hydra, _told(space):
        return hydra.multirun(
            config_name="config",
            task_function=task,
            overrides=[*words, *chosen, *_settings(folder, config_dir)],
            with_log_configuration=False,
        )


def _quiet_optuna() -> None:
    """Its own lines say nothing that the sweep does not."""
    with suppress(ImportError):
        import optuna  # type: ignore[import-not-found,unused-ignore]

        optuna.logging.set_verbosity(optuna.logging.WARNING)


def _settings(folder: Path, config_dir: str | None) -> list[str]:
    user = catalogue.user_conf(config_dir)
    return [*QUIET, f"hydra.sweep.dir='{folder}'", *([f"hydra.searchpath=['file://{user}']"] if user else [])]


@contextmanager
def _hydra() -> Iterator[Any]:
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    register()
    ConfigStore.instance().store(group=LAUNCHER, name=LOCAL, node={"_target_": f"{PLUGINS}.lmlab.LocalLauncher"})
    with initialize_config_dir(str(catalogue.conf_dir()), job_name="lmlab", version_base="1.3"):
        _register_local()
        yield GlobalHydra.instance().hydra


def _register_local() -> None:
    """Hydra takes plug-ins from the package hydra_plugins only and looks their classes up there by name."""
    from hydra.core.plugins import Plugins

    try:
        package = importlib.import_module(PLUGINS)
    except ImportError:  # none is installed
        package = sys.modules[PLUGINS] = ModuleType(PLUGINS)
    module = ModuleType(LocalLauncher.__module__)
    module.LocalLauncher = LocalLauncher  # type: ignore[attr-defined]
    sys.modules[module.__name__] = package.lmlab = module  # type: ignore[attr-defined]
    Plugins.instance().register(LocalLauncher)


@contextmanager
def _told(space: Space) -> Iterator[None]:
    """An unknown launcher or sweeper, and a wrong setting of one, in two lines."""
    from hydra.errors import HydraException

    try:
        yield
    except HydraException as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        known = ", ".join(line.strip() for line in lines if line.startswith("\t") and "provider=" not in line)
        for name in (LAUNCHER, SWEEPER):
            if f"'{name}/{space.chosen(name)}'" in lines[0]:
                problem = f"`{name}={space.chosen(name)}` is not known; choices: {known}"
                raise ConfigError(problem, "joblib, submitit and optuna come with lmlab[sweepers]") from error
        problem = f"Hydra refuses {' '.join(space.hydra)}: {lines[0]}"
        raise ConfigError(problem, "see the documentation of that Hydra plug-in") from error
