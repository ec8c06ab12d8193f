"""`lmlab sweep`: many runs from one line, each trained once, resumable, side by side on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from lmlab.cli.sweep_run import Ended, Sweep

EPILOG = (
    "Examples: lmlab sweep norm=rmsnorm,layernorm --seeds 2 · lmlab sweep 'model.n_layers=range(2,7)' --dry-run · "
    "lmlab sweep experiment=first_look"
)


def register(app: typer.Typer) -> None:
    app.command("sweep", epilog=EPILOG)(sweep)


def sweep(
    overrides: Annotated[
        Optional[list[str]], typer.Argument(metavar="KEY=A,B,…", help="what to vary and what to change for all")
    ] = None,
    seeds: Annotated[
        Optional[int], typer.Option(metavar="N", min=1, max=1000, help="every member with seeds 0…N-1")
    ] = None,
    workers: Annotated[
        Optional[int],
        typer.Option(metavar="N", min=1, help="runs side by side on CPU (default 1); they share the cores"),
    ] = None,
    gpus: Annotated[Optional[str], typer.Option(metavar="0,1,…", help="one run per device, side by side")] = None,
    runs_per_gpu: Annotated[Optional[int], typer.Option(metavar="K", min=1, help="K runs on each device")] = None,
    baseline: Annotated[
        Optional[str], typer.Option(metavar="ARM", help="the arm others are compared with; else the first of each list")
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="go on with runs that failed")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan: runs, parameters, time")] = False,
    force: Annotated[bool, typer.Option("--force", help="train all from the start; earlier runs are kept")] = False,
    reuse_stale: Annotated[
        bool, typer.Option("--reuse-stale", help="accept runs that other code or data made")
    ] = False,
    no_tune_malloc: Annotated[bool, typer.Option("--no-tune-malloc", help="leave the C allocator as it is")] = False,
    config_dir: Annotated[Optional[str], typer.Option(metavar="DIR", help="a conf/ folder of your own")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="how each run ended, as JSON on stdout")] = False,
) -> None:
    """Train every combination of the values given. Finished runs are reused; the same line goes on after a stop."""
    from lmlab.cli.progress import Screen
    from lmlab.cli.sweep_drawn import run_drawn
    from lmlab.cli.sweep_run import Asked, Sweep
    from lmlab.config.catalogue import user_conf
    from lmlab.sweep import launch, pool, slots
    from lmlab.sweep.question import taken
    from lmlab.sweep.space import SWEEPER, read

    words, question = taken(overrides or [])
    places = slots.make(workers, gpus, runs_per_gpu)
    pool.warm()
    space = read(words, seeds=seeds, user=user_conf(config_dir))
    asked = Asked(
        seeds, places, baseline, retry_failed, dry_run, force, reuse_stale, not no_tune_malloc, config_dir, question
    )
    launch.check(space)
    made = Sweep(space, asked, Screen(), words)
    if space.chosen(SWEEPER) or launch.launcher(space) != launch.LOCAL:
        _refuse_slots(made, workers, gpus)
    ended = run_drawn(made) if space.chosen(SWEEPER) else _planned(made, as_json)
    _say(made, ended, as_json)
    raise typer.Exit(ended.exit_code)


def _planned(made: Sweep, as_json: bool) -> Ended:
    """Plan, show the plan, and run it unless only the plan was asked for."""
    from lmlab.cli.sweep_run import Ended
    from lmlab.cli.sweep_tables import plan_table

    made.plan()
    made.baseline()  # one that is not there is refused before anything runs
    plan_table(made, to_stdout=made.asked.dry_run and not as_json)
    if made.asked.dry_run:
        found, runs = made.states(), {m.name: m.path for m in made.members}
        return Ended(made.folder().path, {m.name: found[m.hash][0] for m in made.members}, runs, planned=True)
    return made.run()


def _refuse_slots(made: Sweep, workers: int | None, gpus: str | None) -> None:
    from lmlab.errors import ConfigError
    from lmlab.sweep import launch
    from lmlab.sweep.space import SWEEPER

    given = f"--workers {workers}" if workers is not None else f"--gpus {gpus}" if gpus is not None else None
    name = launch.launcher(made.space)
    from_run = next((o.typed for o in made.space.all_words() if o.key == "init.run"), None)
    if from_run and name != launch.LOCAL:
        problem = f"{from_run} is for lmlab's own launcher, and hydra/launcher={name} is chosen"
        raise ConfigError(problem, "leave the launcher out: --workers N and --gpus run side by side")
    if given and name != launch.LOCAL:
        raise ConfigError(f"{given} is of lmlab's own launcher, and hydra/launcher={name} is chosen", "leave one out")
    if made.asked.seeds is not None and made.space.chosen(SWEEPER):
        hint = "write seed=0,1 for the sweeper to choose from, or leave the sweeper out"
        raise ConfigError(f"--seeds {made.asked.seeds} multiplies a grid; a sweeper chooses its own members", hint)
    if made.asked.baseline is not None and made.space.chosen(SWEEPER):
        problem = f"--baseline {made.asked.baseline} names an arm, and a sweeper chooses its arms while it runs"
        raise ConfigError(problem, "compare afterwards: `lmlab report --baseline …`")


def _say(made: Sweep, ended: Ended, as_json: bool) -> None:
    from lmlab.cli.progress import say
    from lmlab.cli.sweep_tables import as_dict, closing
    from lmlab.runs.files import to_json

    if as_json:
        say(to_json(as_dict(made, ended)))
    elif not ended.planned:
        closing(made, ended)
