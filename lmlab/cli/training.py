"""The middle of a run, inside its claimed directory: build, resume, loop, record, result."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lmlab.cli import plan as planning
from lmlab.cli.plan import Plan
from lmlab.cli.progress import Screen, duration
from lmlab.cli.run_one import Flags, Result, describe
from lmlab.config.identity import changes, code_hash, config_hash, to_dict
from lmlab.config.load import Loaded, Start
from lmlab.config.tree import Experiment
from lmlab.data.prepare import cache_dir
from lmlab.data.source import Source
from lmlab.errors import EXIT_DONE, EXIT_FAILED, RunError
from lmlab.eval.loss import LossSum
from lmlab.eval.probes import StepProbe
from lmlab.eval.routing import choices, stability
from lmlab.generate.sample import sample
from lmlab.runs import checkpoint, manifest, wandb_mirror
from lmlab.runs.metrics import Metrics
from lmlab.runs.routing_names import STABLE_TOKENS, parse
from lmlab.runs.rundir import RunDir
from lmlab.train import device as machine
from lmlab.train.loop import Intervals, Loop, State
from lmlab.train.routing import Routing
from lmlab.train.schedule import Schedule
from lmlab.train.setup import Trainer, metrics_of
from lmlab.train.start import lineage
from lmlab.train.stop import StopSignal


def build_trainer(plan: Plan) -> Trainer:
    """The trainer a plan describes, on a process made deterministic."""
    machine.be_deterministic(plan.device)
    return Trainer.make(
        plan.exp,
        plan.prepared,
        ops=plan.ops,
        device=plan.device,
        dtype=plan.dtype,
        micro_rows=plan.memory.micro_rows,
        compiled=plan.compiled,
        vocab_size=plan.vocab_size,
    )


def schedule_of(plan: Plan) -> Schedule:
    from lmlab.registry import make

    return make(plan.exp.schedule, plan.exp.optim.lr, plan.steps)


def intervals(plan: Plan, stop_at: int | None) -> Intervals:
    """null = save when evaluating."""
    train, every = plan.exp.train, plan.evaluate_every(plan.steps or 1)
    saving = train.checkpoint_every_steps or every
    return Intervals(train.log_every_steps, every, saving, stop_at, train.probe_every_steps)


def train_claimed(
    run: RunDir, loaded: Loaded, prepared: Source, flags: Flags, screen: Screen, command: list[str]
) -> Result:
    exp = loaded.experiment
    malloc = flags.tune_malloc and machine.tune_malloc()
    recorded, begun = run.manifest(), bool(run.checkpoints())
    known = recorded.get("resolved")
    plan = planning.make(exp, prepared, recorded, flags.memory, None if begun else loaded.start)
    trainer = build_trainer(plan)
    state = resume(run, trainer, screen) if begun else begin(run, loaded.start, plan, trainer)
    if known is None:
        pace = planning.measure(plan, trainer)
        plan.steps = planning.bounded_by_minutes(plan, pace)
        run.update_manifest(resolved=plan.resolved(), pace=pace.as_dict())
    else:
        pace = planning.Pace(**run.manifest()["pace"])
    assert plan.steps is not None
    planning.check_stop(plan, flags.stop_at, done=state.step)
    matmul = machine.matmul_rate(plan.device, plan.dtype, torch.get_num_threads())
    about = duration(planning.run_s(plan, pace, plan.steps, done=state.step))
    expected = f"about {about} · MFU is of {matmul / 1e12:.3g} TFLOP/s, matmul here and now"
    describe(screen, plan, run.path, expected, loaded.start)
    facts = machine.torch_facts(plan.device) | {"malloc_tuned": malloc, "matmul_flops_per_s": matmul}
    code = code_hash(loaded.used_plugins())
    now = manifest.collect(command=command, torch_facts=facts, overrides=loaded.overrides)
    run.update_manifest(
        **now,
        state="running",
        sessions=sessions(run, now | {"resolved": plan.resolved(), "code_hash": code}, state, screen),
        choices=loaded.choices,
        changes=changes(exp),
        seeds=exp.seeds(),
        known_failures=plan.skeleton.known_failures(),
        noncausal=plan.skeleton.noncausal() or None,
        parameters=plan.n_parameters,
        active_parameters=plan.n_active,
        flops_per_token=plan.flops_per_token,
        data=prepared.info,
    )
    result = Result("failed", run.path, exit_code=EXIT_FAILED)
    with Metrics(run.metrics_path) as rows:
        rows.cut_back(state.step)
        mirror = wandb_mirror.start(
            vars(exp.wandb),
            run_path=run.path,
            run_id=config_hash(exp),
            name=run.path.name,
            config=to_dict(exp),
            group=exp.wandb.group,
            tags=exp.wandb.tags,
            cache=cache_dir(exp.paths.cache),
            note=screen.note,
        )
        try:
            recorder = Recorder(run, plan, trainer, rows, mirror, screen, matmul)
            result = run_loop(recorder, state, intervals(plan, flags.stop_at))
        finally:
            mirror.finish(result.figures, result.exit_code)
    return result


def sessions(run: RunDir, now: dict[str, Any], state: State, screen: Screen) -> list[dict[str, Any]]:
    """Where and how each part of the run was computed; warns of what differs from the part before."""
    before = run.manifest()
    if state.step:
        for line in manifest.environment_differences(before, now):
            screen.warn(f"since step {state.step}: {line}")
    kept = {key: now[key] for key in ("started", "host", "versions", "torch", "command", "code_hash")}
    return [*before.get("sessions", []), {"from_step": state.step, **kept}]


def run_loop(recorder: Recorder, state: State, every: Intervals) -> Result:
    """The loop under the stop signals, and how it ended."""
    plan, trainer = recorder.plan, recorder.trainer
    assert plan.steps is not None
    loop = Loop(trainer.stepper, trainer.batches, schedule_of(plan), plan.steps, every, plan.flops_per_token, recorder)
    if every.probe is not None:
        loop.probe = StepProbe(trainer.master, trainer.twin.model, trainer.stepper.device)
    with StopSignal() as stop, recorder.screen.training(plan.steps, state.step, trainer.master.noncausal()):
        ended = loop.run(state, stop)
        exit_code = {"finished": EXIT_DONE, "stopped": stop.exit_code, "diverged": EXIT_FAILED}[ended]
        return conclude(recorder.run, trainer, state, ended, exit_code)


def resume(run: RunDir, trainer: Trainer, screen: Screen) -> State:
    """State of the newest undamaged checkpoint; says where the run goes on."""
    found = checkpoint.latest_good(run.path, note=screen.warn)
    if found is None:
        return State()
    state = trainer.load(found)
    screen.note(f"going on with {run.path} from step {state.step}")
    return state


def begin(run: RunDir, start: Start | None, plan: Plan, trainer: Trainer) -> State:
    """Before the first step: weights as they were drawn, or those of the run to start from. These are kept in the run
    as its checkpoint of step 0, so that it can be replayed when the other run is gone."""
    if plan.exp.init.source is None:
        return State()
    if start is None:
        raise RunError(
            f"{run.path} was stopped before it had the weights it starts from", "begin it again by its own command"
        )
    found = checkpoint.load(start.checkpoint)
    if found.content_hash != start.content_hash:
        raise RunError(f"{start.checkpoint} changed while it was read", "see that the other run is not being trained")
    weights = planning.weights(plan.exp, start, found.model, plan.skeleton)
    state = trainer.begin(weights.state)
    own = {"start_hash": checkpoint.content_hash(trainer.master.state_dict())}
    run.update_manifest(lineage=lineage(start, weights, RunDir(start.run).manifest()) | own)
    save(run, plan.exp, trainer, state)
    return state


def save(run: RunDir, exp: Experiment, trainer: Trainer, state: State) -> None:
    """A checkpoint of the run as it stands."""
    checkpoint.save(
        run.path,
        state.step,
        trainer.master.state_dict(),
        trainer.state(state),
        config=to_dict(exp),
        keep_last=exp.train.keep_last,
        best_step=state.best_step,
        keep_first=exp.init.source is not None,
    )


def conclude(run: RunDir, trainer: Trainer, state: State, ended: str, exit_code: int) -> Result:
    """Write how the run ended into its manifest. A finished run's figures are those of its last row of metrics."""
    from lmlab.runs import metrics

    figures: dict[str, Any] = {"step": state.step, "tokens": state.tokens, "elapsed_s": state.elapsed_s}
    if ended == "finished":
        rows = metrics.read(run.metrics_path)
        own = [k for k in rows[-1] if k.split("/")[0] in ("val", "test", "train", "best") and parse(k) is None]
        figures |= {k: rows[-1][k] for k in own}
        speeds = sorted(r["train/tokens_per_s"] for r in rows if r.get("train/tokens_per_s"))
        figures["tokens_per_s"] = speeds[len(speeds) // 2] if speeds else None
        figures["content_hash"] = checkpoint.content_hash(trainer.master.state_dict())
        figures["best_step"] = state.best_step
    if why := trainer.master.noncausal():
        figures["noncausal"] = why
    figures["peak_memory_bytes"] = peak_memory_bytes(trainer.stepper.device)
    run.update_manifest(state=ended, result=figures, kernels=trainer.twin.model.paths())
    return Result(ended, run.path, figures, exit_code)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of the device's allocator; on CPU the process's largest resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass
class Recorder:
    """The loop's surroundings: evaluates, writes rows and checkpoints, and keeps the screen up to date."""

    run: RunDir
    plan: Plan
    trainer: Trainer
    rows: Metrics
    mirror: Any
    screen: Screen
    matmul_flops_per_s: float

    def __post_init__(self) -> None:
        self._sample = ""

    def stepped(self, state: State, loss: float | None) -> None:
        self.screen.stepped(state.step, loss)

    def evaluate(self, state: State, *, final: bool) -> dict[str, Any]:
        """val on the first train.eval_tokens; at the end on all of val, on test once, and the best checkpoint's val."""
        trainer, prepared, train = self.trainer, self.plan.prepared, self.plan.exp.train
        lossless = prepared.lossless
        routing = Routing()
        part = trainer.loss_on(prepared.val, train.eval_tokens, routing)
        row: dict[str, Any] = metrics_of("val", part, lossless=lossless) | {"val/tokens": part.tokens}
        if not math.isfinite(part.nats_per_token):
            return row
        if part.nats_per_token < state.best_loss or part.tokens != state.best_tokens:
            state.best_loss, state.best_step, state.best_tokens = part.nats_per_token, state.step, part.tokens
        if final:
            whole = part
            if part.tokens < prepared.val.n_targets:
                row = metrics_of("part/val", part, lossless=lossless)  # what the earlier evaluations are compared with
                routing = Routing()
                whole = trainer.loss_on(prepared.val, routing=routing)
            row |= metrics_of("val", whole, lossless=lossless) | {"val/tokens": whole.tokens}
            row |= self._best_on_val(state, whole)
            counted = self.run.manifest().get("test_evaluations", 0) + 1
            self.run.update_manifest(test_evaluations=counted)
            row |= metrics_of("test", trainer.loss_on(prepared.test), lossless=lossless) | trainer.answers_on("test")
        row |= trainer.answers_on("val")
        row |= routing.evaluated("val") | self._stability(state.step)
        exp = self.plan.exp
        self._sample = sample(trainer.twin.model, prepared.tokenizer, seq_len=exp.model.seq_len, seed=exp.seed.all)
        return row

    def _best_on_val(self, state: State, last: LossSum) -> dict[str, float]:
        """All of val by the checkpoint that was best at an interval, or by the last one when that is better."""
        lossless = self.plan.prepared.lossless
        ref = next((r for r in self.run.checkpoints() if r.step == state.best_step), None)
        if ref is not None and state.best_step != state.step:
            with self._holding(checkpoint.load(ref.path).model):
                best = self.trainer.loss_on(self.plan.prepared.val)
            if best.nats_per_token < last.nats_per_token:
                return metrics_of("best/val", best, lossless=lossless)
        state.best_step = state.step
        return metrics_of("best/val", last, lossless=lossless)

    def _stability(self, step: int) -> dict[str, float]:
        """How many choices of experts the newest checkpoint before this step made as well; nothing without one. Where
        a run was stopped in between does not count: the figures are then those of a run in one go."""
        regular = intervals(self.plan, None).save
        refs = [ref for ref in self.run.checkpoints() if ref.step < step and ref.step % regular == 0]
        if not refs or not self.trainer.master.routed:
            return {}
        try:
            earlier = checkpoint.load(refs[-1].path).model
        except RunError as error:
            self.screen.warn(f"the stability of routing is not measured: {error.message}")
            return {}
        model, batches = self.trainer.twin.model, list(self.trainer.first_of_val(STABLE_TOKENS))
        now = choices(model, batches)
        with self._holding(earlier):
            return stability(choices(model, batches), now, "val")

    @contextmanager
    def _holding(self, weights: dict[str, torch.Tensor]) -> Iterator[None]:
        """The model with other weights, for as long as it lasts."""
        held = copy.deepcopy(self.trainer.master.state_dict())
        self._put(weights)
        try:
            yield
        finally:
            self._put(held)

    def _put(self, weights: dict[str, torch.Tensor]) -> None:
        self.trainer.master.load_state_dict(weights)
        self.trainer.twin.refresh()

    def record(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.mirror.log(row)
        rate = row.get("train/tokens_per_s")
        extra: dict[str, Any] = {}
        if rate and self.plan.steps:
            left = (self.plan.steps - row["step"]) * self.plan.exp.train.batch_tokens
            extra = {"eta_s": left / rate, "mfu": rate * self.plan.palm_flops_per_token / self.matmul_flops_per_s}
        self.screen.row(row, extra)
        if "val/loss" in row and self._sample:
            self.screen.sample(self._sample)

    def save(self, state: State) -> None:
        self.rows.sync()
        save(self.run, self.plan.exp, self.trainer, state)
