"""Uploading a run to W&B from its metrics.jsonl, the truth about it: the server is asked what it has and is sent what
it lacks, then asked again. So nothing is sent twice and nothing is missing, whatever was mirrored, synced or killed
before; W&B's own offline files are not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmlab.errors import EXIT_DONE, EXIT_FAILED, RunError
from lmlab.runs import metrics, wandb_file
from lmlab.runs.files import plain
from lmlab.runs.rundir import RunDir
from lmlab.runs.wandb_run import (
    FOLDER,
    Facts,
    Mark,
    first_line,
    has_key,
    keep_inside,
    open_run,
    own_service,
    server_step,
)

AGAIN = "give the same command again: what W&B has is not sent twice"


@dataclass(frozen=True)
class Uploaded:
    """What an upload did: how many rows W&B lacked and was sent, and where the run is (None: it was not asked)."""

    run: str
    rows: int
    url: str | None = None


def ready(cache: Path | None = None) -> Any:
    """The wandb module, with a key. Raises RunError when either is missing."""
    keep_inside(cache)
    own_service()
    try:
        import wandb
    except ImportError as error:
        raise RunError("W&B is not installed", "pip install wandb") from error
    if not has_key(wandb):
        raise RunError("W&B has no key", "`wandb login`, or set WANDB_API_KEY")
    return wandb


def was_mirrored(run: RunDir) -> bool:
    """Whether the run was handed to W&B, online or offline."""
    return Mark.exists(run.path)


def upload(run: RunDir, wandb: Any, *, group: str | None = None, tags: Sequence[str] = ()) -> Uploaded:
    """Bring the run on W&B up to its metrics.jsonl. `group` and `tags` serve where the run's own wandb.… name none.

    Raises RunError: the run is in use, or W&B did not take all of it.
    """
    with run.claim():
        rows = metrics.read(run.metrics_path)
        if not rows:
            return Uploaded(run.name, 0)
        mark, last = Mark.of(run.path, run.hash), rows[-1]["step"]
        if mark.uploaded >= last:
            return Uploaded(run.name, 0)
        mark.write(run.path)  # a new id must be known before the first row goes out
        try:
            done = _send(wandb, run, _facts(run, mark.id, group, tags), rows)
        except RunError:
            raise
        except Exception as error:
            raise RunError(f"W&B did not take {run.name}: {first_line(error)}", AGAIN) from error
        replace(mark, step=max(mark.step, last), uploaded=last).write(run.path)
        wandb_file.mark_synced(run.path / FOLDER, mark.id)
        return done


def _send(wandb: Any, run: RunDir, facts: Facts, rows: list[dict[str, Any]]) -> Uploaded:
    """Send what the server lacks. W&B reports no refused row, so it is asked afterwards whether it has all of them."""
    has, url = _session(wandb, run, facts, rows)
    sent = [row for row in rows if row["step"] > has]
    if sent:
        has, _ = _session(wandb, run, facts, [])
        if has < rows[-1]["step"]:
            raise RunError(f"W&B has {run.name} up to step {max(has, 0)} of {rows[-1]['step']} only", AGAIN)
    return Uploaded(run.name, len(sent), url)


def _session(wandb: Any, run: RunDir, facts: Facts, rows: list[dict[str, Any]]) -> tuple[int, str | None]:
    """Go on with the run in W&B, send it those rows that it lacks, and end it as it ended. What it had, and where."""
    manifest = run.manifest()
    session = open_run(wandb, facts, "online")
    try:
        has, url = server_step(session), session.url
        for row in rows:
            if row["step"] > has:
                session.log(plain(row), step=row["step"], commit=True)
        session.summary.update(plain(manifest.get("result") or {}))
    except BaseException:
        with suppress(Exception):
            session.finish(exit_code=EXIT_FAILED)
        raise
    session.finish(exit_code=EXIT_DONE if manifest.get("state") == "finished" else EXIT_FAILED)
    return has, url


def _facts(run: RunDir, identity: str, group: str | None, tags: Sequence[str]) -> Facts:
    config = run.config()
    own = config.get("wandb") or {}
    return Facts(
        "online", run.path, identity, run.name, plain(config), str(own.get("project") or "lmlab"), own.get("entity"),
        own.get("group") or group, tuple(own.get("tags") or tags), own.get("notes"),
    )  # fmt: skip
