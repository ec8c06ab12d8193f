"""One run from a composed experiment to its result: find or make the directory, train or go on, evaluate, record.

The same command again: a finished or diverged run is not trained again, an unfinished one goes on from its last
checkpoint, one made by other code or data is stale and is set aside (`<dir>.old-<n>`) before training anew.
"""

from __future__ import annotations

import math
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmlab.cli.progress import Screen, active_of, count, duration
from lmlab.compat.model import remarks
from lmlab.config.identity import changes, code_hash, config_hash, slug, to_dict
from lmlab.config.load import Loaded, Start
from lmlab.config.tree import Experiment
from lmlab.data.prepare import cache_dir
from lmlab.data.source import Source
from lmlab.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, LmlabError, RunError, TrainingFailed, in_one_line
from lmlab.opened import own_tokenizer
from lmlab.opened import prepared as prepared_by
from lmlab.runs.find import run_directory
from lmlab.runs.rundir import RunDir

if TYPE_CHECKING:
    from lmlab.cli.plan import Plan

ENDED = ("finished", "diverged")
RESULT_COLUMNS = (
    ("val/bits_per_byte", "val", "bits/byte"),
    ("val/loss", "val", "nats/token"),
    ("test/bits_per_byte", "test", "bits/byte"),
    ("val/token_accuracy", "val", "of the answers right"),
    ("test/token_accuracy", "test", "of the answers right"),
)


@dataclass(frozen=True)
class Share:
    """The memory a run may use: on CPU `host_bytes` (None = what is free), of a GPU one of `parts` equal parts."""

    parts: int = 1
    host_bytes: int | None = None


@dataclass(frozen=True)
class Flags:
    """What a flag asks of this invocation; none of it is part of the experiment."""

    stop_at: int | None = None
    force: bool = False
    reuse_stale: bool = False
    dry_run: bool = False
    tune_malloc: bool = True
    memory: Share = Share()


@dataclass
class Result:
    """How it ended, where it lies, and the final figures."""

    state: str
    path: Path
    figures: dict[str, Any] = field(default_factory=dict)
    exit_code: int = EXIT_DONE


def run_one(loaded: Loaded, flags: Flags, screen: Screen, command: list[str], resumed: RunDir | None = None) -> Result:
    """Train (or go on with, or report) the experiment. `resumed`: the directory that `--resume` named, to go on with or
    to be refused. Raises LmlabError with the run's state recorded."""
    exp = loaded.experiment
    with screen.preparing() as progress:
        prepared = prepared_by(exp, tokenizer_of(loaded, resumed), progress)
    path = resumed.path if resumed is not None else run_path(exp)
    if resumed is not None and flags.force:
        refuse_restart(resumed, loaded)
    if resumed is not None and not (flags.force or flags.reuse_stale):
        refuse_stale(resumed, loaded, prepared)
    if exp.name and not path.name.startswith(f"{exp.name}-"):
        screen.note(f"name={exp.name} is not used: this experiment is {path}")
    if not flags.dry_run and (ended := already_ended(path, loaded, prepared, flags, screen)):
        return ended
    from lmlab.check import gate
    from lmlab.cli import plan as planning

    planning.check_kernels(exp)
    known = gate.ensure(exp, cache_dir(exp.paths.cache), loaded.used_plugins())
    begun = {} if resumed is None else {"lineage": resumed.manifest().get("lineage")}
    # refuses what can't run before anything is written
    plan = planning.make(exp, prepared, begun, flags.memory, loaded.start)
    planning.check_stop(plan, flags.stop_at, done=0)
    for note in loaded.notes:
        screen.warn(note)
    for row in known:
        screen.warn(f"known failure, {row.name}: {row.figure}; {row.reason}")
    if flags.dry_run:
        describe(screen, plan, path, "not started (--dry-run)", loaded.start)
        return Result("planned", path)
    run = RunDir(path)
    with run.claim():
        if ended := already_ended(path, loaded, prepared, flags, screen):
            return ended
        clear(run, loaded, prepared, flags, screen)
        screen.log = run.append_log
        try:
            from lmlab.cli.training import train_claimed

            return train_claimed(run, loaded, prepared, flags, screen, command)
        except BaseException as error:
            told = explained(error)
            if isinstance(told, KeyboardInterrupt):
                run.update_manifest(state="stopped")
            elif not (isinstance(told, LmlabError) and told.exit_code == EXIT_USAGE):
                run.append_log(traceback.format_exc())
                run.update_manifest(state="failed", error=in_one_line(told))
            raise told from error


def tokenizer_of(loaded: Loaded, resumed: RunDir | None = None) -> Path | None:
    """The folder of the tokenizer that the run's weights came with; None for one that the experiment makes."""
    if loaded.start is not None:
        return loaded.start.tokenizer
    return None if resumed is None else own_tokenizer(resumed, loaded.experiment)


def run_path(exp: Experiment) -> Path:
    """Where the experiment's run lies: the directory that carries its hash, whatever its name; else a new one."""
    return run_directory(Path(exp.paths.runs).expanduser(), config_hash(exp), exp.name or slug(exp))


def changed_since(run: RunDir, loaded: Loaded, prepared: Source) -> list[str]:
    """Which of code and data are not what the run in the directory was made by; empty when there is no run."""
    manifest = run.manifest() if run.exists() else {}
    now = {"code": ("code_hash", code_hash(loaded.used_plugins())), "data": ("fingerprint", prepared.fingerprint)}
    if not manifest:
        return ["code (its manifest is missing)"] if run.checkpoints() else []
    return [what for what, (key, value) in now.items() if manifest.get(key) != value]


def refuse_stale(run: RunDir, loaded: Loaded, prepared: Source) -> None:
    """`--resume` goes on with the run it names or not at all. Raises RunError."""
    if changed := changed_since(run, loaded, prepared):
        raise RunError(
            f"{run.path} was made by other {' and '.join(changed)}, so resuming can't be exact",
            "train it anew by its own command, or go on all the same with --reuse-stale",
        )


def refuse_restart(run: RunDir, loaded: Loaded) -> None:
    """Raises RunError for a run that would begin anew without the weights it starts from: only its own line has read
    them."""
    init = loaded.experiment.init
    if init.source is not None and loaded.start is None:
        raise RunError(
            f"{run.path} starts from the weights of {init.run}, which --resume does not read again",
            "give its own command with --force",
        )


def already_ended(path: Path, loaded: Loaded, prepared: Source, flags: Flags, screen: Screen) -> Result | None:
    """The result of a finished or diverged run that need not be trained again; None when there is something to do."""
    run = RunDir(path)
    if flags.force:  # also a run whose files can't be read any more
        return None
    manifest = run.manifest() if run.exists() else {}
    state = manifest.get("state")
    changed = changed_since(run, loaded, prepared)
    if state not in ENDED or (changed and not flags.reuse_stale):
        return None
    note = f" (stale: made by other {' and '.join(changed)}, reused)" if changed else ""
    screen.note(f"{state}: {path}{note}; --force trains it again")
    return Result(state, path, manifest.get("result", {}), EXIT_DONE if state == "finished" else EXIT_FAILED)


def clear(run: RunDir, loaded: Loaded, prepared: Source, flags: Flags, screen: Screen) -> None:
    """Make the claimed directory ready: set a forced or stale run aside, write what a fresh one starts with. Raises
    RunError, with nothing moved, when what it starts from is not at hand."""
    what = "" if flags.force else " and ".join(changed_since(run, loaded, prepared))
    if flags.force or (what and not flags.reuse_stale):
        refuse_restart(run, loaded)
    if flags.force and run.exists():
        screen.note(f"--force: the earlier run is kept as {run.set_aside().path}")
    elif what and flags.reuse_stale:
        screen.warn(f"stale: {run.path.name} was begun by other {what}; going on as asked (--reuse-stale)")
    elif what:
        kept = run.set_aside().path.name
        screen.warn(f"stale: {run.path.name} was made by other {what}; it is kept as {kept} and trained anew")
    RunDir.create(run.path, to_dict(loaded.experiment))
    run.save_tokenizer(prepared.tokenizer)
    if not run.manifest():  # what a run was begun with stays on record, also when other code goes on with it
        run.save_plugins(loaded.used_plugins())
        code = code_hash(loaded.used_plugins())
        run.update_manifest(code_hash=code, fingerprint=prepared.fingerprint, tokenizer_hash=prepared.tokenizer_hash)


def describe(screen: Screen, plan: Plan, path: Path, time: str, start: Start | None = None) -> None:
    """The block before training, and a warning when the corpus would be read too often. start: of a run that is yet to
    take its weights."""
    from lmlab.runs.machine import gib
    from lmlab.train.start import lines

    exp, prepared, needs = plan.exp, plan.prepared, plan.memory
    vocab_size, micro = prepared.tokenizer.vocab_size, f"{needs.n_micro} × {needs.micro_rows} rows"
    n, embedded = plan.n_parameters, plan.skeleton.embed.weight.numel()
    flops = f"{count(plan.flops_per_token)} FLOP/token"
    without = f"{count(n - embedded)} without embedding"
    rows = [
        ("changes", "  ".join(changes(exp)) or "nothing (the default)"),
        *(lines(start, plan.taken) if start is not None and plan.taken else []),
        ("model", f"{count(n)} parameters{active_of(n, plan.n_active)} ({without}) · {flops}"),
        *([("experts", experts_line(plan))] if plan.skeleton.routed else []),
        ("data", f"{exp.data.name} · {prepared.said()} · {exp.tokenizer.name} {vocab_size:,}"),
        ("steps", steps_line(plan)),
        ("memory", f"{gib(needs.needed_bytes)} of {gib(needs.free_bytes)} free · micro-batches {micro}"),
        ("kernels", f"{plan.machine()} · {plan.ops.said} · attention: {plan.kernels()['attention']}"),
        ("time", time),
    ]  # fmt: skip
    screen.block(str(path), rows)
    for remark in remarks(exp):
        screen.warn(remark)
    if plan.epochs > 4:
        screen.warn(f"{plan.epochs:.1f} epochs: above 4 expect overfitting; look at the best-on-val figure too")


def experts_line(plan: Plan) -> str:
    """Which layers have experts, how many a token computes, and what moving its rows there and back takes."""
    from lmlab.cost.flops import dispatch_bytes

    moe: Any = plan.exp.moe
    layers = sum(moe.routes(layer) for layer in range(plan.exp.model.n_layers))
    moved = dispatch_bytes(plan.exp.arch, plan.dtype.itemsize)
    shared = f" and {moe.n_shared} shared" if moe.n_shared else ""
    computed = moe.computed(plan.exp.model.seq_len)
    each = f"{moe.n_experts} in {layers} of {plan.exp.model.n_layers} layers, {computed:g} a token{shared}"
    return f"{each} · dispatch {moved:,.0f} bytes/token (its rows gathered, and those that come back)"


def steps_line(plan: Plan) -> str:
    """`300 × 4,096 tokens = 1.23M (0.47 epochs)`, without epochs where every row is new; the minutes when the rate is
    not measured yet."""
    train = plan.exp.train
    if plan.steps is None:
        return f"as many as fit into {train.max_minutes:g} minutes"
    tokens = count(plan.steps * train.batch_tokens)
    epochs = f" ({plan.epochs:.2f} epochs)" if plan.epochs else ""
    return f"{plan.steps:,} × {train.batch_tokens:,} tokens = {tokens}{epochs}"


def explained(error: BaseException) -> BaseException:
    """Out of memory in the user's words; everything else as it is."""
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError) or "can't allocate memory" in text:
        hint = "use a smaller train.micro_batch=, model= or model.seq_len; the same command then goes on or starts anew"
        return TrainingFailed("out of memory while training; the last checkpoint is kept", hint)
    return error


def summary(result: Result) -> dict[str, Any]:
    """What `--json` prints: plain types, non-finite as null."""
    figures = {k: (None if isinstance(v, float) and not math.isfinite(v) else v) for k, v in result.figures.items()}
    return {"state": result.state, "run": str(result.path), **figures}


def result_lines(result: Result) -> list[str]:
    """The result for a person: state, figures, and where to go on."""
    figures = result.figures
    parts = [f"{name} {figures[key]:.4f} {unit}" for key, name, unit in RESULT_COLUMNS if figures.get(key) is not None]
    if figures.get("tokens_per_s"):
        parts.append(f"{figures['tokens_per_s']:,.0f} tokens/s")
    if figures.get("elapsed_s"):
        parts.append(duration(figures["elapsed_s"]))
    at = f" at step {figures['step']}: loss or weights are not finite" if result.state == "diverged" else ""
    lines = [f"{result.state}  {result.path}{at}", *(["  " + " · ".join(parts)] if parts else [])]
    return [*lines, *([f"  {not_causal(why)}"] if (why := figures.get("noncausal")) else [])]


def not_causal(why: str) -> str:
    """What is said beside a loss whose tokens saw later ones."""
    return f"not causal: loss, perplexity and bits/byte are of tokens that see later ones ({why})"
