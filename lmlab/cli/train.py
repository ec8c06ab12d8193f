"""`lmlab train`: compose, check, train, evaluate, log."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from lmlab.cli.progress import Screen
    from lmlab.config.load import Loaded
    from lmlab.runs.rundir import RunDir

EPILOG = (
    "Examples: lmlab train norm=layernorm pos=alibi · lmlab train preset=llama model=tiny lr=1e-3 · lmlab options attn"
)


def register(app: typer.Typer) -> None:
    app.command("train", epilog=EPILOG)(train)


def train(
    overrides: Annotated[
        Optional[list[str]], typer.Argument(metavar="KEY=VALUE", help="what to change from the default")
    ] = None,
    resume: Annotated[
        Optional[str], typer.Option(metavar="RUN|auto", help="go on with this run; auto: the newest unfinished one")
    ] = None,
    from_run: Annotated[
        Optional[str], typer.Option("--from", metavar="RUN", help="start from this run's weights, its composition")
    ] = None,
    stop_at: Annotated[
        Optional[int], typer.Option(metavar="STEP", min=1, help="stop at this step with a checkpoint")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would be trained, and stop")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="train from the start; an earlier run is kept as .old-N")
    ] = False,
    reuse_stale: Annotated[
        bool, typer.Option("--reuse-stale", help="accept a run that other code or data made")
    ] = False,
    no_tune_malloc: Annotated[bool, typer.Option("--no-tune-malloc", help="leave the C allocator as it is")] = False,
    config_dir: Annotated[Optional[str], typer.Option(metavar="DIR", help="a conf/ folder of your own")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the result as JSON on stdout")] = False,
) -> None:
    """Train a model. Without arguments: the default experiment, under 3 minutes on 2 cores."""
    from lmlab.cli.progress import Screen, say
    from lmlab.cli.run_one import Flags, result_lines, run_one, summary

    words, screen = _with_run(overrides or [], from_run, resume), Screen()
    run = None if resume is None else _named(resume, words, screen)
    loaded = _composed(words, config_dir, screen) if run is None else _resumed(run, words, config_dir)
    flags = Flags(stop_at, force, reuse_stale, dry_run, not no_tune_malloc)
    result = run_one(loaded, flags, screen, sys.argv, resumed=run)
    if as_json:
        say(json.dumps(summary(result)))
    elif not dry_run:
        for line in result_lines(result):
            say(line)
    raise typer.Exit(result.exit_code)


def _with_run(words: list[str], from_run: str | None, resume: str | None) -> list[str]:
    """The words with `--from RUN` as the key it is short for. Raises ConfigError: two runs, or one that goes on."""
    from lmlab.config.amend import quoted
    from lmlab.errors import ConfigError

    typed = next((word.partition("=")[2] for word in words if word.startswith("init.run=")), None)
    flag = None if from_run is None else f"--from {from_run}"
    if from_run is not None and typed is not None and typed.strip("'\"") != from_run:
        raise ConfigError(f"`{flag}` and `init.run={typed}` name two runs", "leave one out")
    said = flag or (None if typed is None else f"init.run={typed}")
    if resume is not None and said is not None:
        raise ConfigError(
            f"`--resume {resume}` goes on with a run, and `{said}` starts one", "leave one of the two out"
        )
    return words if from_run is None or typed is not None else [*words, f"init.run={quoted(from_run)}"]


def _composed(words: list[str], config_dir: str | None, screen: Screen) -> Loaded:
    from lmlab.inherit import composed

    return composed(words, config_dir=config_dir, note=screen.warn)


def _named(name: str, words: list[str], screen: Screen) -> RunDir:
    """The run that `--resume` names. Raises RunError."""
    from lmlab.opened import UNFINISHED, runs_root
    from lmlab.runs.find import find, newest

    root = runs_root(words)
    run = newest(root, UNFINISHED) if name == "auto" else find(name, root)
    screen.note(f"resuming {run.path}")
    return run


def _resumed(run: RunDir, words: list[str], config_dir: str | None) -> Loaded:
    """The experiment of an earlier run, with keys outside its identity changed. Raises RunError, ConfigError."""
    from lmlab.config.amend import amend_outside_identity
    from lmlab.opened import experiment_of, refuse_edited, refuse_imported

    refuse_imported(run, "resume")
    experiment = experiment_of(run)
    refuse_edited(run)
    return amend_outside_identity(experiment, words, config_dir=config_dir)
