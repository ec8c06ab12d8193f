"""Weights & Biases as a mirror of metrics.jsonl: a thread of its own feeds it, so that training never waits.

Everything W&B writes lies in the run (`wandb/`) and in the cache. `wandb/mirror.json` keeps the run's id there and the
last step handed over: a resumed run sends what was missed and nothing twice. Whatever goes wrong here is said once and
ends the mirror, never the run.
"""

from __future__ import annotations

import inspect
import json
import netrc
import os
import queue
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lmlab.runs import metrics
from lmlab.runs.files import plain, to_json
from lmlab.runs.layout import METRICS

Note = Callable[[str], None]
FOLDER, MARK = "wandb", "mirror.json"
INIT_TIMEOUT_S = 15
FINISH_TIMEOUT_S = {"online": 60.0, "offline": 20.0}
HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
ENV_MODES = {"dryrun": "offline", "run": "online", "shared": "online"}
# Machine, code and package facts are in the manifest; capturing them again costs time and threads.
QUIET = {
    "silent": True, "console": "off", "disable_git": True, "disable_code": True, "save_code": False,
    "disable_job_creation": True, "x_disable_stats": True, "x_disable_meta": True, "x_disable_machine_info": True,
    "x_save_requirements": False, "init_timeout": INIT_TIMEOUT_S, "summary_warnings": 0,
    "x_transaction_log_flush_interval": 1.0,
}  # fmt: skip
_said: set[str] = set()


@dataclass(frozen=True)
class Facts:
    """What W&B is told about the run besides its rows."""

    mode: str
    path: Path
    id: str
    name: str
    config: dict[str, Any]
    project: str
    entity: str | None
    group: str | None
    tags: tuple[str, ...]
    notes: str | None


def start(
    spec: dict[str, Any],
    *,
    run_path: Path,
    run_id: str,
    name: str,
    config: dict[str, Any],
    group: str | None = None,
    tags: Sequence[str] = (),
    cache: Path | None = None,
    note: Note | None = None,
) -> Mirror:
    """Begin mirroring. `spec` is the `wandb` node of the configuration as a dict. Returns at once and never raises."""
    note = note or _to_stderr
    mirror = Mirror(note)
    try:
        mode = resolve_mode(str(spec.get("mode") or "auto"))
        if mode == "disabled":
            return mirror
        keep_inside(cache)
        mark = _read_mark(run_path)
        identity = str(mark.get("id") or _new_id(run_id))
        facts = Facts(
            mode, run_path, identity, name, plain(config), str(spec.get("project") or "lmlab"), spec.get("entity"),
            group or spec.get("group"), tuple(tags) or tuple(spec.get("tags") or ()), spec.get("notes"),
        )  # fmt: skip
        mirror.begin(facts, int(mark.get("step", -1)))
        for row in metrics.scan(run_path / METRICS).rows:
            mirror.log(row)
    except Exception as error:
        mirror.give_up(error)
    return mirror


def resolve_mode(mode: str) -> str:
    """online, offline, disabled, or auto. What the user wrote in the configuration counts before WANDB_MODE."""
    if mode != "auto":
        return mode
    if os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes"):
        return "disabled"
    asked = os.environ.get("WANDB_MODE", "").lower()
    return ENV_MODES.get(asked, asked) or "auto"


def keep_inside(cache: Path | None) -> None:
    """W&B's logs and staging under our cache, unless the user chose their place; no reports home about errors."""
    root = cache or Path(os.environ.get("LMLAB_CACHE") or Path.home() / ".cache" / "lmlab")
    os.environ.setdefault("WANDB_CACHE_DIR", str(Path(root).absolute()))  # W&B adds its own name to this one only
    os.environ.setdefault("WANDB_DATA_DIR", str(Path(root).absolute() / "wandb"))
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_SILENT", "true")  # what matters is said here, in one line


def has_key(wandb: Any) -> bool:
    """Whether W&B knows who the user is, asked without a prompt."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    if "prompt" in inspect.signature(wandb.login).parameters:
        return bool(wandb.login(prompt=False, verify=False))
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "")).hostname
    with suppress(OSError, netrc.NetrcParseError):
        known = netrc.netrc(os.environ.get("NETRC") or str(Path.home() / ".netrc")).hosts
        return any(h in known for h in ((host,) if host else HOSTS))
    return False


class Mirror:
    """Rows go in by `log`, the end by `finish`; both return at once, save that `finish` waits for what is queued."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._queue: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._dead = False
        self._online = False
        self._mark = -1
        self._facts: Facts

    def begin(self, facts: Facts, mark: int) -> None:
        self._facts, self._mark = facts, mark
        self._thread = threading.Thread(target=self._work, name="lmlab-wandb", daemon=True)
        self._thread.start()

    def log(self, row: dict[str, Any]) -> None:
        """Mirror one row of metrics, unless it or a later one was mirrored before."""
        if self._thread is not None and not self._dead:
            self._queue.put(("row", dict(row)))

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Hand over the final numbers and how the run ended, and wait (not for long) until they are written."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._queue.put(("finish", (plain(summary), exit_code)))
        thread.join(FINISH_TIMEOUT_S["online" if self._online else "offline"])
        if thread.is_alive() and not self._dead:
            self._dead = True
            self._say(f"W&B is slow and was left behind; later: wandb sync {self._facts.path / FOLDER}")

    def give_up(self, error: BaseException) -> None:
        self._dead = True
        reason = str(error).strip().splitlines()
        self._say(f"W&B mirrors nothing more: {reason[0] if reason else type(error).__name__} (the run goes on)")

    def _say(self, text: str) -> None:
        with suppress(Exception):
            self._note(text)

    # ------------------------------------------------------------ in the thread

    def _work(self) -> None:
        try:
            run = self._init()
            while run is not None:
                kind, value = self._queue.get()
                if kind == "finish":
                    run.summary.update(value[0])
                    run.finish(exit_code=value[1])
                    return
                self._send(run, value)
        except Exception as error:
            self.give_up(error)

    def _init(self) -> Any:
        """The W&B run, offline when there is no key or no network; None when W&B is not installed."""
        try:
            import wandb
        except Exception:
            self._dead = True
            _once(self._say, "W&B is not installed: nothing is mirrored (wandb.mode=disabled says so for good)")
            return None
        mode = self._facts.mode
        if mode in ("auto", "online") and not has_key(wandb):
            _once(self._say, f"W&B: no key, so offline; later: wandb sync {self._facts.path / FOLDER}/offline-run-*")
            mode = "offline"
        if mode != "offline":
            try:
                return self._open(wandb, "online")
            except Exception as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                self._say(f"W&B: {reason}; offline, later: wandb sync {self._facts.path / FOLDER}/offline-run-*")
                return self._open_offline(wandb)
        return self._open(wandb, "offline")

    def _open_offline(self, wandb: Any) -> Any:
        """After a failed attempt. When W&B still holds its id: a run of its own, with all rows from the start."""
        try:
            return self._open(wandb, "offline")
        except Exception:
            self._facts, self._mark = replace(self._facts, id=_new_id(self._facts.id.rsplit("-", 1)[0])), -1
            return self._open(wandb, "offline")

    def _open(self, wandb: Any, mode: str) -> Any:
        facts = self._facts
        known = getattr(wandb.Settings, "model_fields", QUIET)
        run = wandb.init(
            mode=mode,
            dir=str(facts.path),
            id=facts.id,
            resume="allow" if mode == "online" else None,
            name=facts.name,
            config=facts.config,
            project=facts.project,
            entity=facts.entity,
            group=facts.group,
            tags=list(facts.tags),
            notes=facts.notes,
            settings=wandb.Settings(**{key: value for key, value in QUIET.items() if key in known}),
        )
        self._online = mode == "online"
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _send(self, run: Any, row: dict[str, Any]) -> None:
        step = row["step"]
        if step > self._mark:
            self._mark = step
            _write_mark(
                self._facts.path, {"id": self._facts.id, "step": step}
            )  # before: a kill here sends nothing twice
            run.log(plain(row), step=step, commit=True)


def _new_id(run_id: str) -> str:
    """The run's hash and something of its own: a run trained anew with --force is another one to W&B."""
    return f"{run_id}-{secrets.token_hex(3)}"


def _read_mark(run_path: Path) -> dict[str, Any]:
    try:
        found = json.loads((run_path / FOLDER / MARK).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_mark(run_path: Path, mark: dict[str, Any]) -> None:
    path = run_path / FOLDER / MARK
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{MARK}.tmp")
    temporary.write_text(to_json(mark))
    os.replace(temporary, path)


def _once(say: Note, text: str) -> None:
    """Say it for the first run of this process only."""
    key = text.split(";")[0]
    if key not in _said:
        _said.add(key)
        say(text)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
