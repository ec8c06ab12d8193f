"""`hydra/sweeper=…`: Hydra's sweeper chooses the members while it runs; each is listed in the sweep as it comes."""

from __future__ import annotations

import sys

from lmlab.cli.sweep_run import Ended, Sweep, stoppable
from lmlab.cli.sweep_screen import SweepScreen
from lmlab.cli.sweep_survey import prepared_for
from lmlab.cli.sweep_task import WORST
from lmlab.sweep import launch
from lmlab.sweep.folder import SweepFolder, sweep_name
from lmlab.sweep.ledger import state_of
from lmlab.sweep.members import compose
from lmlab.sweep.pool import Job, Pool
from lmlab.sweep.space import SWEEPER, Space


def run_drawn(made: Sweep) -> Ended:
    """Run what the sweeper chooses. Raises LmlabError when it can't start."""
    asked, space = made.asked, made.space
    first = Space(space.fixed, {key: values[:1] for key, values in space.axes.items()}, space.hydra)
    made.members, _ = compose(first, config_dir=asked.config_dir)  # what is wrong for all is told now
    exp = made.members[0].loaded.experiment
    with made.screen.preparing() as progress:
        prepared_for(made.members[0], {}, progress)
    name = sweep_name(space, made.members, exp.name or asked.name)
    folder = SweepFolder.beside(exp.paths.runs, name)
    made.screen.block(str(folder.path), [("sweeper", str(space.chosen(SWEEPER))), ("all have", made.shared())])
    if asked.dry_run:
        made.screen.note("its members are chosen while it runs (--dry-run)")
        return Ended(folder.path, {}, planned=True)
    folder.add([], command=sys.argv, words=made.words)
    before = len(folder.events())
    task = made.task(folder, lists=True)
    with stoppable():
        launch.multirun(space, task, folder.path.absolute(), _batch(made, folder), asked.config_dir)
    return _chosen(folder, before)


def _batch(made: Sweep, folder: SweepFolder) -> launch.RunAll:
    """One batch of a sweeper through the pool: the losses of its jobs, infinity for what did not finish."""
    task = made.task(folder, lists=True)

    def run_all(batch: list[list[str]]) -> list[float]:
        jobs = [Job(words, task.label_of(words) or " ".join(words)) for words in batch]
        screen = SweepScreen(made.screen, len(jobs), len(made.asked.slots), {})
        with screen.showing():
            Pool(task.work, made.asked.slots, screen).run(jobs)
        return [j.outcome.loss if j.outcome and j.outcome.loss is not None else WORST for j in jobs]

    return run_all


def _chosen(folder: SweepFolder, before: int) -> Ended:
    """How the members chosen in this call ended (events after the first `before`); those refused without a run, too."""
    events = folder.events()[before:]
    errors = {str(e.get("run")): str(e["error"]) for e in events if e.get("error")}
    words = {m["run"]: " ".join(m["overrides"]) for m in folder.plan()["members"]}
    found = Ended(folder.path, {})
    for run in dict.fromkeys(str(e["run"]) for e in events if e.get("run")):
        path, name = folder.path.parents[1] / run, words.get(run, run)
        state, manifest = state_of(path)
        if state != "finished" and (text := manifest.get("error") or errors.get(run)):
            found.errors[name] = str(text)
        found.states[name], found.runs[name] = state, path
    for number, error in enumerate(str(e["error"]) for e in events if e.get("error") and not e.get("run")):
        found.states[f"refused {number}"], found.errors[f"refused {number}"] = "failed", error
    return found
