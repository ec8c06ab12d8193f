"""`lmlab verify`: train a run again from its directory alone, and compare bit for bit."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from lmlab.runs.files import plain

if TYPE_CHECKING:
    from lmlab.cli.progress import Screen
    from lmlab.config.tree import Experiment
    from lmlab.runs.rundir import RunDir
    from lmlab.train.loop import State
    from lmlab.train.setup import Trainer

COMPARED = (
    "tokens",
    "flops",
    "train/loss",
    "train/lr",
    "train/grad_norm",
    "train/loss_scale",
    "train/skipped_steps",
    "val/loss",
    "val/bits_per_byte",
)
ANSWERS = ("/token_accuracy", "/exact")


def register(app: typer.Typer) -> None:
    app.command("verify")(verify)


def verify(
    words: Annotated[
        list[str], typer.Argument(metavar="RUN [paths.runs=FOLDER]", help="path, name, or 4+ characters of its hash")
    ],
    steps: Annotated[Optional[int], typer.Option(metavar="N", min=1, help="replay only the first N steps")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the verdict as JSON on stdout")] = False,
) -> None:
    """Replay a run from its directory: bit-identical, or the first step that differs and what differs around it."""
    from lmlab.cli.progress import Screen, say
    from lmlab.errors import EXIT_DONE, EXIT_FAILED, ConfigError
    from lmlab.opened import refuse_imported, runs_root
    from lmlab.runs.find import find

    names = [w for w in words if not w.startswith("paths.runs=")]
    if len(names) != 1 or "=" in names[0]:
        given = " ".join(names) or "none"
        raise ConfigError(f"`lmlab verify` takes one RUN, not {given}", "`lmlab runs ls` lists them")
    run = find(names[0], runs_root(words))
    refuse_imported(run, "replay")
    verdict = replay(run, steps, Screen())
    say(json.dumps(verdict.as_dict()) if as_json else verdict.text())
    raise typer.Exit(EXIT_DONE if verdict.identical else EXIT_FAILED)


@dataclass
class Verdict:
    """What a replay found."""

    run: str
    steps: int = 0
    rows: int = 0
    checkpoints: int = 0
    first_difference: dict[str, Any] | None = None
    environment: list[str] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        return self.first_difference is None

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "identical": self.identical}

    def text(self) -> str:
        compared = f"{self.steps} steps, {self.rows} rows of metrics, {self.checkpoints} checkpoints compared"
        if self.identical:
            return f"identical: {self.run}: {compared}"
        d = self.first_difference or {}
        lines = [f"differs: {self.run} at step {d['step']}: {d['what']} was {d['then']}, now {d['now']} ({compared})"]
        around = self.environment or ["nothing that is recorded: same code, data, versions, machine and threads"]
        return "\n".join(lines + [f"  environment: {line}" for line in around])


class _Stop(Exception):
    pass


@dataclass
class _Comparer:
    """Stands where the run's recorder stood: compares each row and checkpoint with what is on disk, writes nothing."""

    trainer: Trainer
    rows: dict[int, dict[str, Any]]
    hashes: dict[int, str]
    verdict: Verdict
    screen: Screen

    def stepped(self, state: State, loss: float | None) -> None:
        self.verdict.steps = state.step
        self.screen.stepped(state.step, loss)
        then = self.hashes.get(state.step)
        if then is not None:
            from lmlab.runs.checkpoint import content_hash

            self.verdict.checkpoints += 1
            self._compare(state.step, "the weights' content hash", then, content_hash(self.trainer.master.state_dict()))

    def evaluate(self, state: State, *, final: bool) -> dict[str, Any]:
        """Validation on as many tokens as the recorded row says, where there is one."""
        from lmlab.train.setup import metrics_of

        tokens = self.rows.get(state.step, {}).get("val/tokens")
        if tokens is None:
            return {"val/loss": 0.0}
        prepared = self.trainer.prepared
        found = metrics_of("val", self.trainer.loss_on(prepared.val, tokens), lossless=prepared.lossless)
        return found | self.trainer.answers_on("val")

    def record(self, row: dict[str, Any]) -> None:
        then = self.rows.get(row["step"])
        if then is None:
            return
        self.verdict.rows += 1
        row = plain(row)  # non-finite is null on disk
        for key in (*COMPARED, *(key for key in row if key.endswith(ANSWERS))):
            if key in then and (key in row or not key.startswith("val/")):
                self._compare(row["step"], key, then[key], row.get(key))

    def save(self, state: State) -> None:
        pass

    def _compare(self, step: int, what: str, then: Any, now: Any) -> None:
        if then != now:
            self.verdict.first_difference = {"step": step, "what": what, "then": then, "now": now}
            raise _Stop


def replay(run: RunDir, steps: int | None, screen: Screen) -> Verdict:
    """Train again in memory, comparing as it goes. Raises RunError when there is nothing to compare."""
    from lmlab.cli import plan as planning
    from lmlab.cli.training import build_trainer, schedule_of
    from lmlab.config.identity import code_hash
    from lmlab.errors import RunError
    from lmlab.opened import experiment_of, own_tokenizer, refuse_other_data
    from lmlab.opened import prepared as prepared_by
    from lmlab.runs import checkpoint, manifest, metrics
    from lmlab.train import device as machine
    from lmlab.train.loop import Intervals, Loop, State
    from lmlab.train.stop import StopSignal

    then = run.manifest()
    rows = {row["step"]: row for row in metrics.read(run.metrics_path)}
    known = then.get("resolved")
    if known is None or not rows:
        raise RunError(f"{run.path} has trained no step yet", "train it first")
    exp = experiment_of(run)
    exp.device = known["device"]
    with screen.preparing() as progress:
        prepared = prepared_by(exp, own_tokenizer(run, exp), progress)
    refuse_other_data(run, prepared)
    verdict = Verdict(str(run.path))
    plan = planning.make(exp, prepared, then)
    trainer = build_trainer(plan)
    machine.tune_malloc()
    facts = machine.torch_facts(plan.device)
    now = manifest.collect(command=[], torch_facts=facts, overrides=[]) | {
        "fingerprint": prepared.fingerprint,
        "code_hash": code_hash(run_plugins(run)),
        "resolved": plan.resolved(),
    }
    verdict.environment = manifest.environment_differences(then, now)
    verdict.first_difference = _inconsistent(then.get("result", {}), rows) or _begun(run, exp, trainer)
    if verdict.first_difference is not None:
        return verdict
    hashes = {ref.step: checkpoint.load(ref.path).content_hash for ref in run.checkpoints()}
    if (final := then.get("result", {}).get("content_hash")) and then.get("state") == "finished":
        hashes[known["steps"]] = final
    last = min(steps or known["steps"], max([*rows, *hashes]))
    comparer = _Comparer(trainer, rows, hashes, verdict, screen)
    looks = [step for step, row in rows.items() if "val/tokens" in row]
    every = Intervals(log=1, evaluate=math.gcd(*looks) or plan.steps or 1, save=plan.steps or 1, stop_at=last)
    loop = Loop(
        trainer.stepper, trainer.batches, schedule_of(plan), known["steps"], every, plan.flops_per_token, comparer
    )
    screen.note(f"replaying {last} steps of {run.path}")
    with screen.training(last, 0, trainer.master.noncausal()), StopSignal() as stop:
        try:
            ended = loop.run(State(), stop)  # `_begun` has put back what it started from
        except _Stop:
            return verdict
    if stop.received:
        raise typer.Exit(stop.exit_code)
    if ended == "diverged" and then.get("state") != "diverged":
        verdict.first_difference = {"step": verdict.steps, "what": "the loss", "then": "finite", "now": "not finite"}
    return verdict


def _begun(run: RunDir, exp: Experiment, trainer: Trainer) -> dict[str, Any] | None:
    """Put back the weights that the run took from another, which its checkpoint of step 0 keeps; what is wrong with
    them. Raises RunError when they are gone."""
    from lmlab.errors import RunError
    from lmlab.runs import checkpoint

    if exp.init.source is None:
        return None
    ref = next((ref for ref in run.checkpoints() if ref.step == 0), None)
    if ref is None:
        raise RunError(
            f"{run.path} has lost its checkpoint of step 0, the weights it starts from", "restore it from a copy"
        )
    found = checkpoint.load(ref.path)
    trainer.load(found)
    then = (run.manifest().get("lineage") or {}).get("start_hash")
    if found.content_hash == then:
        return None
    return {"step": 0, "what": "the starting weights' content hash", "then": then, "now": found.content_hash}


def _inconsistent(result: dict[str, Any], rows: dict[int, dict[str, Any]]) -> dict[str, Any] | None:
    """A figure of the manifest's result that the last row of metrics does not have."""
    step = max(rows)
    for key in result.keys() & rows[step].keys() - {"elapsed_s"}:
        if result[key] != rows[step][key]:
            what = f"{key} (metrics.jsonl, manifest)"
            return {"step": step, "what": what, "then": rows[step][key], "now": result[key]}
    return None


def run_plugins(run: RunDir) -> dict[str, str]:
    """{file name: source} of the run's copies of its plug-ins."""
    return {path.name: path.read_text(encoding="utf-8") for path in run.plugins()}
