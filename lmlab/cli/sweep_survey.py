"""What a sweep costs, known before it starts: each arm's parameters, FLOPs, steps, memory and time.

Runs in a process of the pool, so that the sweep's own never imports torch. The seconds of one arm are measured (unless
a run of it was measured before) and scaled to the others by their FLOPs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmlab.cli.run_one import Share, tokenizer_of
from lmlab.data.prepare import cache_dir
from lmlab.data.source import Source
from lmlab.errors import LmlabError, raise_all
from lmlab.opened import prepared as prepared_by
from lmlab.sweep.members import Member, compose, named
from lmlab.sweep.space import Space

if TYPE_CHECKING:
    from lmlab.cli.plan import Pace, Plan

START_S = 3.0  # of each run: compose, load, build, measure its own pace (2.5 s on a quiet CPU)
TRIED = 3  # arms, for one whose speed can be measured


@dataclass(frozen=True)
class ArmPlan:
    """Of one arm: steps is None while train.max_minutes waits for a measured rate; run_s: seconds of one run, None when
    nothing could be measured."""

    parameters: int
    active_parameters: int
    flops_per_token: float
    steps: int | None
    tokens: int | None
    epochs: float
    needed_bytes: int
    free_bytes: int
    micro_rows: int
    machine: str
    kernels: dict[str, str]
    run_s: float | None


def survey(
    space: Space, config_dir: str | None, share: Share, paces: Mapping[str, dict[str, float]], measure: bool = True
) -> dict[str, ArmPlan]:
    """By arm. `paces`: what runs of an arm measured before, by arm. Raises LmlabError naming members that can't run."""
    from lmlab.check import gate
    from lmlab.cli import plan as planning

    members, _ = compose(space.of_one_seed(), config_dir=config_dir)
    data: dict[str, Source] = {}
    plans: dict[str, Plan] = {}
    wrong: list[tuple[str, LmlabError]] = []
    for member in members:
        try:
            exp = member.loaded.experiment
            planning.check_kernels(exp)
            gate.ensure(exp, cache_dir(exp.paths.cache), member.loaded.used_plugins())
            prepared = prepared_for(member, data)
            plans[member.arm] = planning.make(exp, prepared, share=share, start=member.loaded.start)
        except LmlabError as error:
            wrong.append((member.label, error))
    raise_all(named(wrong, total=len(wrong) + len(plans)))
    known = {arm: planning.Pace(**pace) for arm, pace in paces.items() if arm in plans}
    for arm in list(plans)[: 0 if known or not measure else TRIED]:
        if pace := _measured(plans[arm]):
            known[arm] = pace
            break
    return {arm: _told(plan, _pace(arm, plan, plans, known)) for arm, plan in plans.items()}


def prepared_for(member: Member, known: dict[str, Source], progress: Any = None) -> Source:
    """The data of a member, prepared once per corpus and tokenizer, and per length of a row, which tasks depend on."""
    exp, tokenizer = member.loaded.experiment, tokenizer_of(member.loaded)
    key = repr((exp.data, exp.tokenizer, exp.model.seq_len, exp.paths.cache, tokenizer))
    if key not in known:
        known[key] = prepared_by(exp, tokenizer, progress or (lambda what, share: None))
    return known[key]


def _measured(plan: Plan) -> Pace | None:
    """None for an arm that fails: that is told when its run does, and must not stop the others."""
    from lmlab.cli import plan as planning
    from lmlab.cli.training import build_trainer

    try:
        return planning.measure(plan, build_trainer(plan))
    except Exception:
        return None


def _pace(arm: str, plan: Plan, plans: Mapping[str, Plan], known: Mapping[str, Pace]) -> Pace | None:
    """The arm's own, or another's scaled by the FLOPs of a token and the tokens of a step."""
    from lmlab.cli.plan import Pace

    if arm in known or not known:
        return known.get(arm)
    other, pace = next(iter(known.items()))
    each = plan.flops_per_token / plans[other].flops_per_token
    batch = plan.exp.train.batch_tokens / plans[other].exp.train.batch_tokens
    return Pace(pace.step_s * each * batch, pace.eval_token_s * each, pace.sample_s)


def _told(plan: Plan, pace: Pace | None) -> ArmPlan:
    from lmlab.cli import plan as planning

    train = plan.exp.train
    steps = plan.steps
    if train.max_minutes is not None and pace is not None:
        steps = planning.bounded_by_minutes(plan, pace)
    return ArmPlan(
        parameters=plan.n_parameters,
        active_parameters=plan.n_active,
        flops_per_token=plan.flops_per_token,
        steps=plan.steps,
        tokens=None if plan.steps is None else plan.steps * train.batch_tokens,
        epochs=plan.prepared.epochs((steps or 0) * train.batch_tokens),
        needed_bytes=plan.memory.needed_bytes,
        free_bytes=plan.memory.free_bytes,
        micro_rows=plan.memory.micro_rows,
        machine=plan.machine(),
        kernels=plan.kernels(),
        run_s=None if pace is None or steps is None else START_S + planning.run_s(plan, pace, steps),
    )
