"""`lmlab check`: what must hold for the composed model, asked of it at a small size in float64."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

if TYPE_CHECKING:
    from lmlab.check.everything import Outcome
    from lmlab.check.rows import Row

EPILOG = (
    "Examples: lmlab check · lmlab check norm=layernorm pos=alibi attn.window=64 · lmlab check plugins=\\[my_attn.py] "
    "attn=my_attn"
)
HEAD = ("row", "state", "figure", "")


def register(app: typer.Typer) -> None:
    app.command("check", epilog=EPILOG)(check)


def check(
    overrides: Annotated[
        Optional[list[str]], typer.Argument(metavar="KEY=VALUE", help="what to change from the default")
    ] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="every option, every pair of two groups, every choice beside an option (minutes)"),
    ] = False,
    config_dir: Annotated[Optional[str], typer.Option(metavar="DIR", help="a conf/ folder of your own")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the rows as JSON on stdout")] = False,
) -> None:
    """Check the composed model: formulas, causality, packing, gradients, kernels, dead flags. Exit 1 if a row fails."""
    words = overrides or []
    failed = _everything(words, config_dir, as_json) if everything else _one(words, config_dir, as_json)
    raise typer.Exit(1 if failed else 0)


def _one(words: Sequence[str], config_dir: str | None, as_json: bool) -> bool:
    from lmlab.check.all_rows import QUESTIONS, failed
    from lmlab.cli.tables import print_table

    rows = all_rows(words, config_dir)
    by_name = {row.name: row for row in rows}
    if as_json:
        print(json.dumps({"rows": [vars(row) for row in rows], "questions": dict(QUESTIONS)}))
    else:
        print_table(HEAD, [(row.name, row.state, row.figure, row.reason) for row in rows])
        print()
        answers = [(question, answered_by(names, by_name)) for question, names in QUESTIONS]
        print_table(("asked of every implementation", "answered by"), answers)
    return bool(failed(rows))


def all_rows(words: Sequence[str], config_dir: str | None = None) -> list[Row]:
    """Every row of the composition that the words describe."""
    from lmlab.check.all_rows import asked
    from lmlab.check.flags import dead_flags
    from lmlab.check.rows import attempted
    from lmlab.cli.check_plan import planned
    from lmlab.cli.plan import check_kernels
    from lmlab.config.load import load
    from lmlab.errors import ConfigError
    from lmlab.inherit import refuse_run

    refuse_run(words, "lmlab check")
    experiment = load(words, config_dir=config_dir).experiment
    check_kernels(experiment)
    if getattr(experiment.attn, "backend", None) == "flex":
        raise ConfigError(
            "`attn.backend` is flex, which has no float64 and no backward on the CPU, where a check is asked",
            "leave attn.backend out: the parts are checked all the same",
        )
    rows = asked(experiment)
    dead = attempted("dead flags", lambda: dead_flags(words, experiment, planned, config_dir))
    return [*rows, dead]


def answered_by(names: Sequence[str], rows: dict[str, Row]) -> str:
    """`oracle pass, shift pass`."""
    return ", ".join(f"{name} {rows[name].state}" for name in names if name in rows) or "not asked"


def _everything(words: Sequence[str], config_dir: str | None, as_json: bool) -> bool:
    """One line per composition that does not pass all its rows, and a summary."""
    from lmlab.check.everything import run
    from lmlab.cli.check_plan import planned
    from lmlab.cli.progress import Screen

    screen, wrong, outcomes = Screen(), 0, []
    for outcome in run(words, planned, config_dir):
        wrong += bool(outcome.failed)
        outcomes.append(outcome)
        if not as_json and (outcome.failed or outcome.known):
            print(line(outcome), flush=True)
        if len(outcomes) % 100 == 0:
            screen.note(f"{len(outcomes)} compositions, {wrong} with a failed row")
    told = summary(outcomes)
    print(json.dumps(told) if as_json else told["summary"])
    return wrong > 0


def line(outcome: Outcome) -> str:
    """`norm=batchnorm attn=mla: known causality in training (…)`."""
    parts = [f"{row.state} {row.name} ({row.figure}{'; ' * bool(row.reason)}{row.reason})" for row in outcome.told()]
    return f"{outcome.what}: {' · '.join(parts)}"


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts, and how often each rule refused."""
    refused: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.refused:
            refused[outcome.refused] = refused.get(outcome.refused, 0) + 1
    asked = [o for o in outcomes if not o.refused]
    bad, known = [o for o in asked if o.failed], [o for o in asked if o.known and not o.failed]
    by_rule = ", ".join(f"{rule} {n}" for rule, n in sorted(refused.items(), key=lambda item: -item[1]))
    text = (
        f"{len(asked)} compositions: {len(asked) - len(bad) - len(known)} pass, {len(known)} with known failures, "
        f"{len(bad)} fail; {sum(refused.values())} refused" + (f" ({by_rule})" if by_rule else "")
    )
    failures = {o.what: [vars(row) for row in o.failed] for o in bad}
    return {"summary": text, "failed": failures, "known": [o.what for o in known], "refused": refused}
