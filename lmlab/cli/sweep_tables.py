"""A sweep in tables: what it will do, and how it ended."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lmlab.cli.progress import active_of, count, duration, say
from lmlab.cli.tables import print_table
from lmlab.errors import LmlabError, listed
from lmlab.sweep.ledger import is_open

if TYPE_CHECKING:
    from lmlab.cli.sweep_run import Ended, Sweep
    from lmlab.cli.sweep_survey import ArmPlan

MISSING = "–"
HEAD = ("arm", "seeds", "state", "parameters", "FLOP/token", "steps", "tokens", "memory", "time a run")


def plan_table(made: Sweep, *, to_stdout: bool) -> None:
    """One row per arm, and one line that sums up. On stdout when the plan is all that was asked for."""
    screen, folder = made.screen, made.folder()
    found = made.states()
    states = {h: state for h, (state, _) in found.items()}
    open_ = [m for m in made.members if is_open(*found[m.hash], made.rule) or states[m.hash] == "running"]
    screen.block(str(folder.path), [(k, v) for k, v in _facts(made) if v])
    rows = [_row(made, arm, plan, states) for arm, plan in made.plans.items()]
    print_table(HEAD, rows, console=None if to_stdout else screen.console)
    expected = made.expected_s()
    seconds = sum(expected.get(m.name, 0.0) for m in open_) / len(made.asked.slots)
    side = f", {len(made.asked.slots)} side by side" if len(made.asked.slots) > 1 else ""
    about = f": about {duration(seconds)}" if expected or not open_ else ", in a time that could not be measured"
    total = f"{len(made.members)} runs, {len(open_)} to train{side}{about}"
    say(total) if to_stdout else screen.note(total)


def _facts(made: Sweep) -> list[tuple[str, str]]:
    arms = {m.arm: m.label for m in made.members}
    machines = sorted({plan.machine for plan in made.plans.values()})
    return [("all have", made.shared()), ("baseline", arms[made.baseline()]), ("machine", ", ".join(machines))]


def _row(made: Sweep, arm: str, plan: ArmPlan, states: dict[str, str]) -> tuple[str, ...]:
    from lmlab.runs.machine import gib

    mine = [m for m in made.members if m.arm == arm]
    counted = [states[m.hash] for m in mine]
    reference = made.plans[made.baseline()]
    return (
        mine[0].label or "(all the same)",
        _seeds([m.seeds for m in mine]),
        " ".join(f"{counted.count(s)} {s}" for s in dict.fromkeys(counted)),
        count(plan.parameters)
        + active_of(plan.parameters, plan.active_parameters)
        + _versus(plan.parameters, reference.parameters),
        count(plan.flops_per_token) + _versus(plan.flops_per_token, reference.flops_per_token),
        MISSING if plan.steps is None else f"{plan.steps:,}",
        MISSING if plan.tokens is None else count(plan.tokens),
        f"{gib(plan.needed_bytes)} of {gib(plan.free_bytes)}",
        MISSING if plan.run_s is None else duration(plan.run_s),
    )


def _seeds(words: list[str]) -> str:
    """`seed=0 seed=1 seed=2` → 0…2; other seeds than seed= in full."""
    plain = [int(w.removeprefix("seed=")) for w in words if w.removeprefix("seed=").isdecimal()]
    if len(plain) == len(words):
        if len(plain) > 3 and plain == list(range(plain[0], plain[-1] + 1)):
            return f"{plain[0]}…{plain[-1]}"
        return ",".join(map(str, plain))
    return listed(" ".join(p.removeprefix("seed.").removeprefix("seed=") for p in w.split()) for w in words)


def _versus(value: float, reference: float) -> str:
    """` (+3.1 %)` against the baseline; nothing when equal."""
    return "" if value == reference else f" ({value / reference - 1:+.1%})"


def as_dict(made: Sweep, ended: Ended) -> dict[str, Any]:
    """What `--json` prints: how each member stands, and what each arm was planned to take."""
    labels = {m.arm: m.label for m in made.members}
    arms = [{"arm": labels[arm], **asdict(plan)} for arm, plan in made.plans.items()]
    members = [
        {"member": name, "state": state, "run": str(ended.runs.get(name, "")), "error": ended.errors.get(name)}
        for name, state in ended.states.items()
    ]
    return {"sweep": str(ended.folder), "arms": arms, "members": members}


def _arms(ended: Ended) -> None:
    """The table of arms, as the report shows it. Of the whole sweep, also what earlier calls trained."""
    from lmlab.cli.tables import stdout
    from lmlab.config.identity import outside_identity
    from lmlab.report.build import build
    from lmlab.report.sources import opened
    from lmlab.report.terminal import show_arms

    with opened([str(ended.folder)], ended.folder.parents[1]) as selection:
        show_arms(build(selection, outside_identity), stdout())


def closing(made: Sweep, ended: Ended) -> None:
    """How many ended how, the table of failures, and what to type next."""
    counts = list(ended.states.values())
    say(f"{ended.folder}: " + ", ".join(f"{counts.count(s)} {s}" for s in dict.fromkeys(counts)))
    if "finished" in counts:
        with suppress(LmlabError):  # the table is an extra; what it can't read `lmlab report` tells
            _arms(ended)
    bad = [(name, state) for name, state in ended.states.items() if state != "finished"]
    if bad:
        rows = [
            (name, state, ended.errors.get(name, MISSING), str(ended.runs[name] / "log.txt")) for name, state in bad
        ]
        print_table(("not finished", "state", "why", "its log"), rows)
    failed = any(state == "failed" for _, state in bad)
    made.screen.note(
        f"next: lmlab report {ended.folder.name}"
        + (" · lmlab sweep … --retry-failed goes on with those" if failed else "")
    )
