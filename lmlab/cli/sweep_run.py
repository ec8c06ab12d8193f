"""One call of `lmlab sweep`: plan, list, run what is open, and say how every member ended."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmlab.cli.progress import Screen
from lmlab.cli.run_one import Flags, Share
from lmlab.cli.sweep_screen import SweepScreen
from lmlab.cli.sweep_survey import ArmPlan, prepared_for, survey
from lmlab.cli.sweep_task import SweepTask
from lmlab.config import parse
from lmlab.config.identity import code_hash
from lmlab.config.load import hydra_words
from lmlab.errors import EXIT_DONE, EXIT_FAILED, ConfigError, LmlabError, TrainingFailed, in_one_line, listed
from lmlab.runs.layout import now
from lmlab.runs.machine import free_host_bytes
from lmlab.runs.noncausal import recorded
from lmlab.runs.rundir import RunDir
from lmlab.sweep import launch, pool
from lmlab.sweep.folder import SweepFolder, sweep_name
from lmlab.sweep.ledger import Made, Rule, is_open, state_of
from lmlab.sweep.members import Member, compose
from lmlab.sweep.pool import TRIES, Job, Outcome, Pool
from lmlab.sweep.slots import Slot, sees_gpu
from lmlab.sweep.space import Space, is_seed

POLL_S = 1.0


@dataclass
class Asked:
    """The flags of the call."""

    seeds: int | None = None
    slots: Sequence[Slot] = (Slot(0),)
    baseline: str | None = None
    retry_failed: bool = False
    dry_run: bool = False
    force: bool = False
    reuse_stale: bool = False
    tune_malloc: bool = True
    config_dir: str | None = None
    name: str | None = None  # of the sweep, when its words do not name it


@dataclass
class Ended:
    """How the call ended: the state of every member, and what went wrong with some."""

    folder: Path
    states: dict[str, str]  # of every member, by its name
    runs: dict[str, Path] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    planned: bool = False  # only planned: --dry-run

    @property
    def exit_code(self) -> int:
        return EXIT_DONE if self.planned or set(self.states.values()) <= {"finished"} else EXIT_FAILED


@dataclass
class Sweep:
    """A sweep being called: its space and how it was asked for."""

    space: Space
    asked: Asked
    screen: Screen
    words: list[str]
    members: list[Member] = field(default_factory=list)
    made: dict[str, Made] = field(default_factory=dict)
    plans: dict[str, ArmPlan] = field(default_factory=dict)
    rule: Rule = field(default_factory=Rule)

    def __post_init__(self) -> None:
        asked = self.asked
        self.rule = Rule(now() if asked.force else None, asked.retry_failed, asked.reuse_stale)
        first = asked.slots[0]
        divided = first.share > 1 and first.gpu is None
        self.share = Share(first.share, free_host_bytes() // first.share if divided else None)

    # ------------------------------------------------------------ before

    def plan(self) -> None:
        """Compose and check every member, prepare the data, survey every arm. Raises LmlabError; writes no run."""
        asked = self.asked
        self.members, notes = compose(self.space, config_dir=asked.config_dir)
        for note in notes:
            self.screen.warn(note)
        self._check_gpus()
        with self.screen.preparing() as progress:
            data: dict[str, Any] = {}
            prints = {m.hash: prepared_for(m, data, progress).fingerprint for m in self.members}
        codes = {key: code_hash(dict(key)) for key in {self._plugins(m) for m in self.members}}
        self.made = {m.hash: Made(codes[self._plugins(m)], prints[m.hash]) for m in self.members}
        paces = {m.arm: pace for m in self.members if (pace := self._pace(m))}
        known = (self.space, asked.config_dir, self.share, paces)
        try:
            self.plans = pool.call(survey, *known, slot=asked.slots[0])
        except pool.Died:  # an arm that dies must not stop the others; its own run tells of it
            self.plans = pool.call(survey, *known, False, slot=asked.slots[0])

    @staticmethod
    def _plugins(member: Member) -> tuple[tuple[str, str], ...]:
        return tuple(sorted(member.loaded.used_plugins().items()))

    def _check_gpus(self) -> None:
        """Raises ConfigError when `--gpus` names what torch does not see, or the members are not to use it."""
        device = self.members[0].loaded.experiment.device
        for slot in {s.gpu: s for s in self.asked.slots if s.gpu is not None}.values():
            if device not in ("auto", "cuda"):
                raise ConfigError(f"--gpus {slot.gpu} and device={device} contradict each other", "leave one out")
            if not pool.call(sees_gpu, slot=slot):
                problem = f"--gpus names {slot.gpu}, and torch sees no such GPU here"
                raise ConfigError(problem, "`nvidia-smi -L` lists them; on CPU runs go side by side with --workers N")

    def _pace(self, member: Member) -> dict[str, float] | None:
        """What a run of this member measured on this machine, by this code."""
        import platform

        state, manifest = state_of(member.path, self.made.get(member.hash))
        here = manifest.get("host") == platform.node() and state not in ("planned", "stale")
        return manifest.get("pace") if here else None

    def states(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """State and manifest of each member, by hash."""
        return {m.hash: state_of(m.path, self.made.get(m.hash), self.rule) for m in self.members}

    def folder(self) -> SweepFolder:
        first = self.members[0].loaded.experiment
        name = sweep_name(self.space, self.members, first.name or self.asked.name)
        return SweepFolder.beside(first.paths.runs, name)

    def baseline(self) -> str:
        """The arm that others are compared with: the one named, else the first. Raises ConfigError."""
        text = self.asked.baseline
        if text is None:
            return self.members[0].arm
        wanted = set(text.replace(",", " ").split())
        arms = {m.arm: m.label for m in self.members}
        found = [arm for arm, label in arms.items() if wanted and wanted <= set(label.split())]
        found = found or [m.arm for m in self.members if text in (m.path.name, m.hash)]
        if len(set(found)) == 1:
            return found[0]
        problem = "is not an arm of this sweep" if not found else f"could be {listed(arms[a] for a in found)}"
        raise ConfigError(f"--baseline {text} {problem}", f"the arms: {listed(arms.values())}")

    def expected_s(self) -> dict[str, float]:
        """Seconds each member will take, by name."""
        return {m.name: s for m in self.members if (s := self.plans[m.arm].run_s) is not None}

    # ------------------------------------------------------------ running

    def run(self) -> Ended:
        """Run what is open. Raises KeyboardInterrupt, and SystemExit for other stop signals, with checkpoints saved."""
        folder = self.folder()
        folder.add(self.members, command=sys.argv, words=self.words, baseline=self.baseline())
        try:
            with stoppable():
                if launch.launcher(self.space) == launch.LOCAL:
                    self._run_local(folder)
                else:
                    self._run_by_launcher(folder)
        except (KeyboardInterrupt, SystemExit):
            counts = list(self.ended(folder).states.values())
            said = ", ".join(f"{counts.count(s)} {s}" for s in dict.fromkeys(counts))
            self.screen.note(f"stopped: {said}; the same line goes on")
            raise
        return self.ended(folder)

    def task(self, folder: SweepFolder, **more: Any) -> SweepTask:
        asked = self.asked
        flags = Flags(force=asked.force, reuse_stale=asked.reuse_stale, tune_malloc=asked.tune_malloc)
        keys = [key for key in self.space.axes if not is_seed(key)] + [w.partition("=")[0] for w in self.space.drawn]
        varied = tuple(dict.fromkeys([*keys, *(alias for alias, key in parse.ALIASES.items() if key in keys)]))
        return SweepTask(
            folder.path.absolute(),
            flags,
            self.rule,
            sys.argv,
            varied,
            asked.config_dir,
            host_bytes=self.share.host_bytes,
            **more,
        )

    def _run_local(self, folder: SweepFolder) -> None:
        jobs = [Job(m.words, m.name, m.path) for m in self.members]
        by_name = {m.name: m for m in self.members}
        screen = SweepScreen(self.screen, len(jobs), len(self.asked.slots), self.expected_s())
        screen.ended_before = lambda job: self._ended_before(by_name[job.name])

        def log_of(job: Job) -> Path:
            return folder.log_path(by_name[job.name].path.name)

        with screen.showing():
            Pool(self.task(folder).work, self.asked.slots, screen, log_of).run(jobs)
        for job in jobs:
            if job.outcome is not None and job.outcome.state == "killed":
                self._bury(folder, by_name[job.name], f"{job.outcome.error}, {job.tries} times")

    def _bury(self, folder: SweepFolder, member: Member, error: str) -> None:
        """A member whose process died at every try has failed: told in its run, with what the process wrote last."""
        folder.log("killed", member.path.name, error=error)
        run, log = RunDir(member.path), folder.log_path(member.path.name)
        with suppress(LmlabError), run.claim():
            if run.exists():
                run.append_log(log.read_text(errors="replace") if log.exists() else "")
                run.append_log(error)
                run.update_manifest(state="failed", error=error)

    def _ended_before(self, member: Member) -> Outcome | None:
        """How a member ended that is not to be trained (again); None for one that is open."""
        state, manifest = state_of(member.path, self.made[member.hash], self.rule)
        if is_open(state, manifest, self.rule):
            return None
        loss = (manifest.get("result") or {}).get("val/loss")
        good, why = state == "finished", recorded(manifest)
        return Outcome(state, member.path, loss if good else None, manifest.get("error"), why)

    def _run_by_launcher(self, folder: SweepFolder) -> None:
        """Rounds over what is open. A launcher may lose its workers, and all it was given with them: then what is left
        is launched one by one, so that a member that kills its process takes no other with it."""
        tries: dict[str, int] = {}
        known, told = len(folder.events()), ""
        while True:
            before = self.states()
            todo = [m for m in self.members if is_open(*before[m.hash], self.rule) and tries.get(m.hash, 0) < TRIES]
            if not todo and any(state == "running" for state, _ in before.values()):
                time.sleep(POLL_S)  # another sweep is at it
                continue
            if not todo:
                break
            batch = todo[:1] if told else todo
            for m in batch:
                tries[m.hash] = tries.get(m.hash, 0) + 1
            words = [hydra_words(parse.read(m.words)[0]) for m in batch]
            try:
                launch.launch(self.space, words, self.task(folder), folder.path.absolute(), self.asked.config_dir)
            except Exception as error:
                told = in_one_line(error)
                self.screen.warn(f"the launcher stopped: {told}")
                if not any(event["event"] == "began" for event in folder.events()[known:]):
                    raise TrainingFailed(
                        f"the launcher fails before any run begins: {told}",
                        "see its documentation, or leave hydra/launcher= out: --workers N runs side by side here",
                    ) from error
        for m in self.members:
            if told and tries.get(m.hash, 0) >= TRIES and is_open(*self.states()[m.hash], self.rule):
                self._bury(folder, m, f"its process died, {TRIES} times: {told}")

    # ------------------------------------------------------------ after

    def ended(self, folder: SweepFolder) -> Ended:
        """How every member stands now, from its own directory; what failed before it had one, from the ledger."""
        found = Ended(folder.path, {})
        told = {str(e.get("run")): str(e["error"]) for e in folder.events() if e.get("error")}
        for m in self.members:
            state, manifest = state_of(m.path, self.made[m.hash], self.rule)
            text = manifest.get("error") or told.get(m.path.name) or (told.get("") if state == "planned" else None)
            if state == "stale":
                text = "made by other code or data than this sweep began with: something was edited meanwhile"
            if state == "diverged":
                text = f"the loss or the weights are not finite at step {(manifest.get('result') or {}).get('step')}"
            if state != "finished" and text:
                found.errors[m.name] = str(text)
                state = "failed" if state in ("planned", "created") else state
            found.states[m.name], found.runs[m.name] = state, m.path
        return found

    def shared(self) -> str:
        """What the members share, of what was typed: `model=nano train.max_steps=20`."""
        own = ("name", "paths.runs", "paths.cache")
        return " ".join(f"{o.key}={o.value}" for o in self.space.fixed if o.key not in own)


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM and SIGHUP as exceptions, so that the pool stops its children with checkpoints: exit 143, 129."""

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    old = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
