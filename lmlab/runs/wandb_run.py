"""A run as W&B knows it: who it is, how it is opened, and what is known of the rows W&B took.

Everything W&B writes lies in the run (`wandb/`) and in the cache. `wandb/mirror.json` is the mark: the run's id there,
the last step handed over, the file that took it, and the last step that the server was seen to have.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import netrc
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lmlab.runs import wandb_file
from lmlab.runs.files import to_json

FOLDER, MARK = "wandb", "mirror.json"
TAG_LENGTH = 64
INIT_TIMEOUT_S = 15
HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
# Machine, code and package facts are in the manifest; capturing them again costs time and threads.
QUIET = {
    "silent": True, "console": "off", "disable_git": True, "disable_code": True, "save_code": False,
    "disable_job_creation": True, "x_disable_stats": True, "x_disable_meta": True, "x_disable_machine_info": True,
    "x_save_requirements": False, "init_timeout": INIT_TIMEOUT_S, "summary_warnings": 0,
    "x_transaction_log_flush_interval": 1.0,
}  # fmt: skip


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


@dataclass(frozen=True)
class Mark:
    """What is known of the rows that W&B took; -1 is none."""

    id: str
    step: int = -1  # the last one handed over
    file: str = ""  # W&B's file that took it, seen from wandb/
    before: int = -1  # the last step that the files before that one hold
    uploaded: int = -1  # the last step that the server was seen to have

    @classmethod
    def of(cls, run_path: Path, run_id: str) -> Mark:
        """As written in the run, else a new one."""
        try:
            found = json.loads((run_path / FOLDER / MARK).read_text())
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict) or "id" not in found:
            return cls(cls.fresh_id(run_id))
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in found.items() if key in known})

    @staticmethod
    def exists(run_path: Path) -> bool:
        return (run_path / FOLDER / MARK).is_file()

    @staticmethod
    def fresh_id(run_id: str) -> str:
        """The run's hash and something of its own: a run trained anew with --force is another one to W&B."""
        return f"{run_id or 'run'}-{secrets.token_hex(3)}"

    def write(self, run_path: Path) -> None:
        path = run_path / FOLDER / MARK
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{MARK}.tmp")
        temporary.write_text(to_json(asdict(self)))
        os.replace(temporary, path)

    def last_step(self, run_path: Path) -> int:
        """The last step that W&B has: of what was handed over, a kill may have lost the end, so its file is read. Where
        that was cleaned away, the mark is all there is to go by."""
        path = run_path / FOLDER / self.file
        if not path.is_file():
            return max(self.step, self.uploaded)
        return max([self.before, self.uploaded, *wandb_file.settled_steps(path)])


def open_run(wandb: Any, facts: Facts, mode: str) -> Any:
    """The run in W&B, new or gone on with. Offline, `resume` makes `wandb sync` add to the run instead of replacing."""
    known = getattr(wandb.Settings, "model_fields", QUIET)
    run = wandb.init(
        mode=mode,
        dir=str(facts.path),
        id=facts.id,
        resume="allow",
        reinit="create_new",  # else W&B hands out a run of this process that was left behind, as if it were this one
        name=facts.name,
        config=facts.config,
        project=facts.project,
        entity=facts.entity,
        group=facts.group,
        tags=short_tags(facts.tags),
        notes=facts.notes,
        settings=wandb.Settings(**{key: value for key, value in QUIET.items() if key in known}),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def file_of(run: Any, run_id: str) -> str:
    """W&B's file of the open run, seen from wandb/."""
    return f"{Path(run.dir).parent.name}/run-{run_id}.wandb"


def server_step(run: Any) -> int:
    """The last step that the server has of a run opened online; -1 for none."""
    return int(run.starting_step) - 1 if run.resumed else -1


def short_tags(tags: Iterable[Any]) -> list[str]:
    """Tags as W&B takes them: 1 to 64 characters, each once. A long one keeps its start, then a hash tells it apart."""
    words = (str(tag).strip() for tag in tags)
    return list(dict.fromkeys(word if len(word) <= TAG_LENGTH else _cut(word) for word in words if word))


def _cut(tag: str) -> str:
    digest = hashlib.sha256(tag.encode("utf-8", "surrogatepass")).hexdigest()[:6]
    return f"{tag[: TAG_LENGTH - 8]}..{digest}"


def keep_inside(cache: Path | None) -> None:
    """W&B's logs and staging under our cache, unless the user chose their place; no reports home about errors."""
    root = cache or Path(os.environ.get("LMLAB_CACHE") or Path.home() / ".cache" / "lmlab")
    os.environ.setdefault("WANDB_CACHE_DIR", str(Path(root).absolute()))  # W&B adds its own name to this one only
    os.environ.setdefault("WANDB_DATA_DIR", str(Path(root).absolute() / "wandb"))
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_SILENT", "true")  # what matters is said here, in one line


def own_service() -> None:
    """Forget the W&B process that a parent process started: it would hold a killed run's id for as long as it lives."""
    token = os.environ.get("WANDB_SERVICE", "").split("-")  # version-pid-kind-place
    if len(token) > 1 and token[1] != str(os.getpid()):
        del os.environ["WANDB_SERVICE"]


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


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
