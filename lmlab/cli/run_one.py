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

from lmlab.cli.progress import Screen, count, duration
from lmlab.config.identity import code_hash, config_hash, differs, slug, to_dict
from lmlab.config.load import Loaded
from lmlab.config.tree import Experiment
from lmlab.data.prepare import Prepared, cache_dir, prepare
from lmlab.errors import EXIT_DONE, EXIT_FAILED, TrainingFailed
from lmlab.runs.rundir import RunDir

if TYPE_CHECKING:
    from lmlab.cli.plan import Plan

ENDED = ("finished", "diverged")
RESULT_COLUMNS = (
    ("val/bits_per_byte", "val", "bits/byte"),
    ("val/loss", "val", "nats/token"),
    ("test/bits_per_byte", "test", "bits/byte"),
)


@dataclass(frozen=True)
class Flags:
    """What a flag asks of this invocation; none of it is part of the experiment."""

    stop_at: int | None = None
    force: bool = False
    reuse_stale: bool = False
    dry_run: bool = False
    tune_malloc: bool = True


@dataclass
class Result:
    """How it ended, where it lies, and the final figures."""

    state: str
    path: Path
    figures: dict[str, Any] = field(default_factory=dict)
    exit_code: int = EXIT_DONE


def run_one(loaded: Loaded, flags: Flags, screen: Screen, command: list[str]) -> Result:
    """Train (or go on with, or report) the experiment. Raises LmlabError with the run's state recorded."""
    exp = loaded.experiment
    with screen.preparing() as progress:
        prepared = prepare(exp.data, exp.tokenizer, cache_dir(exp.paths.cache), progress=progress)
    if flags.dry_run:
        from lmlab.cli import plan

        describe(screen, plan.make(exp, prepared), run_path(exp), "not started (--dry-run)")
        return Result("planned", run_path(exp))
    run = RunDir(run_path(exp))
    with run.claim():
        ended = settle(run, loaded, prepared, flags, screen)
        if ended is not None:
            return ended
        screen.log = run.append_log
        try:
            from lmlab.cli.training import train_claimed

            return train_claimed(run, loaded, prepared, flags, screen, command)
        except BaseException as error:
            run.append_log(traceback.format_exc())
            run.update_manifest(state="failed", error=str(error) or type(error).__name__)
            raise explained(error) from error


def run_path(exp: Experiment) -> Path:
    """Where the experiment's run lies: the directory that carries its hash, whatever its name; else a new one."""
    root, hash8 = Path(exp.paths.runs), config_hash(exp)
    known = sorted(p for p in root.glob(f"*-{hash8}") if (p / "config.yaml").is_file()) if root.is_dir() else []
    return known[0] if known else root / f"{exp.name or slug(exp)}-{hash8}"


def settle(run: RunDir, loaded: Loaded, prepared: Prepared, flags: Flags, screen: Screen) -> Result | None:
    """Decide about what lies in the directory: the result when there is nothing to do, None when to train."""
    manifest = run.manifest() if run.exists() else {}
    code = code_hash(loaded.used_plugins())
    old = {"code": manifest.get("code_hash"), "data": manifest.get("fingerprint")}
    new = {"code": code, "data": prepared.fingerprint}
    changed = [key for key in new if manifest and old[key] != new[key]]
    if flags.force and run.exists():
        screen.note(f"--force: the earlier run is kept as {run.set_aside().path}")
    elif changed and not flags.reuse_stale:
        what = " and ".join(changed)
        screen.warn(f"stale: {run.path.name} was made by other {what}; it is kept as {run.set_aside().path.name} and trained anew")
    elif manifest.get("state") in ENDED:
        state = manifest["state"]
        note = f" (stale: other {' and '.join(changed)}, reused)" if changed else ""
        screen.note(f"{state}: {run.path}{note}; --force trains it again")
        return Result(state, run.path, manifest.get("result", {}), EXIT_DONE if state == "finished" else EXIT_FAILED)
    elif changed:
        screen.warn(f"stale: {run.path.name} was begun by other {' and '.join(changed)}; going on as asked (--reuse-stale)")
    if not run.manifest():
        RunDir.create(run.path, to_dict(loaded.experiment))
        run.save_plugins(loaded.used_plugins())
        run.save_tokenizer(prepared.tokenizer)
    run.update_manifest(code_hash=code, fingerprint=prepared.fingerprint, tokenizer_hash=prepared.tokenizer_hash)
    return None


def describe(screen: Screen, plan: Plan, path: Path, time: str) -> None:
    """The block before training."""
    from lmlab.train.memory import gib

    exp, info, memory = plan.exp, plan.prepared.info, plan.memory
    changed = "  ".join(f"{key}={value}" for key, (_, value) in differs(exp).items()) or "nothing (the default)"
    n, embed = plan.n_parameters, plan.prepared.tokenizer.vocab_size * exp.model.d_model
    steps = f"{plan.steps} × {exp.train.batch_tokens:,} tokens" if plan.steps else f"{exp.train.max_minutes:g} minutes"
    if plan.steps:
        seen = plan.steps * exp.train.batch_tokens
        epochs = seen / plan.prepared.train.n_tokens
        steps += f" = {count(seen)}, {epochs:.2f} epochs"
    rows = f"{memory.micro_rows} rows × {memory.n_micro}"
    operations = {**plan.ops.names, **plan.skeleton.paths()}
    compiled = "compiled" if plan.compiled else "eager"
    screen.block(
        str(path),
        [
            ("changes", changed),
            ("model", f"{count(n)} parameters ({count(n - embed)} without embedding) · {count(plan.flops_per_token)} FLOP/token"),
            ("data", f"{exp.data.name} · {plan.prepared.train.n_tokens:,} tokens · tokenizer {exp.tokenizer.name} {plan.prepared.tokenizer.vocab_size}"),
            ("steps", steps),
            ("memory", f"{gib(memory.needed_bytes)} of {gib(memory.free_bytes)} free · micro-batch {rows}"),
            ("kernels", f"{plan.device} {str(plan.dtype).removeprefix('torch.')} {compiled} · " + ", ".join(f"{k}: {v}" for k, v in operations.items())),
            ("time", time),
        ],
    )  # fmt: skip
    epochs = (plan.steps or 0) * exp.train.batch_tokens / plan.prepared.train.n_tokens
    if epochs > 4:
        screen.warn(f"{epochs:.1f} epochs: above 4 a model of this kind overfits; read the best-on-val figure too")


def explained(error: BaseException) -> BaseException:
    """Out of memory in the user's words; everything else as it is."""
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError) or "can't allocate memory" in text:
        from lmlab.train.memory import HINT

        return TrainingFailed("out of memory while training; the last checkpoint is kept", HINT.format(micro="N"))
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
    return [f"{result.state}  {result.path}", *(["  " + " · ".join(parts)] if parts else [])]
