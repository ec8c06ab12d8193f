"""`lmlab eval --tasks lm_eval:NAME`: a run's checkpoint on tasks of lm_eval (the extra `lm-eval`).

A table with standard errors; all of it, and what it was computed with, in the run's eval/*.json.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmlab.cli.open_run import Opened
    from lmlab.cli.progress import Screen
    from lmlab.runs.rundir import RunDir

HEAD = ("task", "version", "n", "shots", "filter", "metric", "value", "stderr")
LONGEST_NAME = 60


@dataclass(frozen=True)
class TaskFlags:
    """`names`: of tasks and task files. batch_size None: as many rows as training took."""

    names: tuple[str, ...]
    limit: int | None
    batch_size: int | None
    bos: str

    @classmethod
    def of(
        cls,
        tasks: str | None,
        *,
        limit: int | None,
        batch_size: int | None,
        bos: str | None,
        split: str | None,
        probe: bool,
        cache: str | None,
    ) -> TaskFlags | None:
        """None without --tasks. Raises ConfigError for flags that would have nothing to act on."""
        from lmlab.errors import ConfigError
        from lmlab.eval.harness_tasks import named

        mine = (("--limit", limit is not None), ("--batch-size", batch_size is not None), ("--bos", bos is not None))
        others = (("--split", split is not None), ("--probe", probe), ("--cache", cache is not None))
        for flag, given in mine if tasks is None else others:
            if given:
                what = "acts on tasks, and --tasks is not given" if tasks is None else "does not act on --tasks"
                raise ConfigError(f"`{flag}` {what}", f"leave {flag} out" + (" or give --tasks" * (tasks is None)))
        if tasks is None:
            return None
        if bos not in (None, "always", "empty"):
            raise ConfigError(f"`--bos` is {bos}", "use always or empty (only where a text has nothing before it)")
        return cls(tuple(named(tasks)), limit, batch_size, bos or "always")

    def load(self) -> dict[str, dict[str, Any]]:
        """The tasks, for all runs. Raises ConfigError, DataError, before any model is made."""
        from lmlab.eval import harness

        harness.require()
        return harness.load(self.names)


def evaluate_tasks(
    run: RunDir, opened: Opened, flags: TaskFlags, loaded: dict[str, dict[str, Any]], screen: Screen, *, as_json: bool
) -> None:
    """Run the tasks, record the report, print it."""
    from lmlab.cli.decoding import unlike_whole_rows
    from lmlab.cli.progress import say
    from lmlab.cli.tables import print_table
    from lmlab.eval import harness
    from lmlab.eval.harness_model import HarnessModel
    from lmlab.opened import ends_of
    from lmlab.runs.evals import record
    from lmlab.runs.files import to_json

    size = flags.batch_size or opened.rows
    with screen.preparing() as progress:
        how: dict[str, Any] = {"batch_size": size, "bos": flags.bos, "ends": ends_of(run, opened.tokenizer)}
        lm = HarnessModel(opened.model(), opened.tokenizer, progress=progress, **how)
        found = harness.run(lm, loaded, limit=flags.limit)
    report = {
        "run": str(run.path),
        **opened.told(),
        "asked": list(flags.names),
        "lm_eval": harness.require(),
        "bos": flags.bos,
        "start": opened.tokenizer.start_name,
        "limit": flags.limit,
        "batch_size": size,
        "max_length": lm.max_length,
        "seed": lm.seed,
        **found,
    }
    if said := unlike_whole_rows(lm.model, "scores are of whole rows, texts are made token by token"):
        screen.note(said)
    for name, task in found["tasks"].items():
        if task["cut_requests"]:
            screen.warn(_cut_line(name, task, lm.max_length))
    record(run, report, of=_file_name(found["tasks"]))
    if as_json:
        say(to_json(report))
        return
    where = f"{run.path}  step {opened.checkpoint.step}, lm_eval {report['lm_eval']}"
    screen.note(f"{where}, {opened.tokenizer.start_name} before {_before(flags.bos)}")
    print_table(HEAD, _table(found))


def _before(bos: str) -> str:
    return "each context" if bos == "always" else "texts without a context"


def _cut_line(name: str, task: dict[str, Any], max_length: int) -> str:
    many = f"{task['cut_requests']:,} of {task['requests']:,} requests are longer than {max_length:,} tokens"
    return f"{name}: {many}: {task['cut_tokens']:,} tokens were cut off on the left"


def _file_name(tasks: dict[str, Any]) -> str:
    return "lm_eval-" + re.sub(r"[^\w.+-]+", "_", "+".join(tasks))[:LONGEST_NAME]


def _table(found: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, task in {**found["tasks"], **found["groups"]}.items():
        known = (task.get(key) for key in ("version", "n", "n_shots"))
        first = [name, *("–" if value is None else str(value) for value in known)]
        for figure in task["figures"]:
            shown = f"{figure['value']:.4f}" if isinstance(figure["value"], float) else str(figure["value"])
            stderr = "–" if figure["stderr"] is None else f"{figure['stderr']:.4f}"
            rows.append([*first, figure["filter"], figure["metric"], shown, stderr])
    return rows
