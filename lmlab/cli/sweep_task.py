"""What one member of a sweep does, in whatever process a launcher runs it: train, and never raise.

Picklable. `__call__` is the task of Hydra's launchers, given a composed configuration; `work` is that of the local
pool, given the member's words. Both return to the sweep what the run's own directory says as well.
"""

from __future__ import annotations

import dataclasses
import io
import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmlab.cli.run_one import Flags, Result, Share, run_one
from lmlab.config.load import Loaded, value_errors
from lmlab.errors import EXIT_FAILED, ConfigError, LmlabError, in_one_line
from lmlab.inherit import composed
from lmlab.runs.claim import InUse, is_claimed
from lmlab.sweep.folder import SweepFolder
from lmlab.sweep.ledger import Rule, is_forced, is_open, state_of
from lmlab.sweep.members import Member, member
from lmlab.sweep.pool import Outcome
from lmlab.sweep.slots import Slot

if TYPE_CHECKING:
    from lmlab.cli.progress import Screen

WORST = math.inf  # a sweeper's worst: optuna stops on None and NaN


@dataclass
class SweepTask:
    """`varied`: the keys that differ between members, for labels and tags; `lists`: add each member to the plan, which
    the members of a Hydra sweeper are not in yet; `host_bytes`: memory of one slot on CPU."""

    folder: Path
    flags: Flags
    rule: Rule
    command: list[str]
    varied: tuple[str, ...] = ()
    config_dir: str | None = None
    lists: bool = False
    host_bytes: int | None = None

    def work(self, words: list[str], slot: Slot) -> Outcome:
        """A member in a process of the local pool; what it prints is in its run's log.txt."""
        from rich.console import Console

        from lmlab.cli.progress import Screen

        try:
            loaded = composed(words, config_dir=self.config_dir)
        except LmlabError as error:
            return Outcome("failed", error=error.message)
        flags = dataclasses.replace(self.flags, memory=Share(slot.share, self.host_bytes))
        return self.train(loaded, flags, Screen(Console(file=io.StringIO(), width=200)))

    def __call__(self, config: Any) -> float:
        """A member by one of Hydra's launchers. Returns val/loss, or infinity when there is none."""
        from lmlab.cli.progress import Screen

        try:
            loaded = self._loaded(config)
        except Exception as error:
            SweepFolder(self.folder).log("failed", "", error=in_one_line(error))
            Screen().warn(in_one_line(error))
            return WORST
        screen = Screen()
        outcome = self.train(loaded, self.flags, screen)
        if outcome.error and outcome.state != "busy":
            screen.warn(f"{outcome.state}: {outcome.error}")
        return outcome.loss if outcome.loss is not None else WORST

    def train(self, loaded: Loaded, flags: Flags, screen: Screen) -> Outcome:
        """Train the member if it is open. Never raises an Exception; a stop asked for by a signal goes on up."""
        one = member(loaded, self.label(loaded))
        folder = SweepFolder(self.folder)
        self._tag(loaded, one)
        try:
            if self.lists:
                folder.add([one])
            state, manifest = state_of(one.path)
            forced = is_forced(manifest, self.rule)
            if self.lists and state == "failed" and not is_open(state, manifest, self.rule):
                return Outcome("failed", one.path, error=manifest.get("error"))
            if is_claimed(one.path):
                return Outcome("busy", one.path)
            folder.log("began", one.path.name)
            result = run_one(loaded, dataclasses.replace(flags, force=forced), screen, self.command)
        except InUse as error:
            return Outcome("busy", one.path, error=error.message)
        except LmlabError as error:
            return self._failed(one, error.message)
        except Exception as error:
            return self._failed(one, in_one_line(error), traceback.format_exc())
        return self._ended(one, result)

    def label(self, loaded: Loaded) -> str:
        """`norm=rmsnorm pos=rope`, of the words that differ between members."""
        return self.label_of(loaded.overrides)

    def label_of(self, words: Sequence[str]) -> str:
        return " ".join(w for w in words if w.partition("=")[0] in self.varied)

    def _tag(self, loaded: Loaded, one: Member) -> None:
        """The sweep is the group in W&B, what differs are tags; what the user set stays."""
        wandb = loaded.experiment.wandb
        wandb.group = wandb.group or self.folder.name
        wandb.tags = [*wandb.tags, *(w for w in one.label.split(" ") if w and w not in wandb.tags)]

    def _loaded(self, config: Any) -> Loaded:
        """The experiment of a composed configuration, checked as `load` does."""
        from hydra.core.hydra_config import HydraConfig
        from omegaconf import OmegaConf

        from lmlab.compat import rules
        from lmlab.config.load import chosen
        from lmlab.config.parse import import_plugins
        from lmlab.config.tree import Experiment
        from lmlab.errors import raise_all

        sources, errors = import_plugins([str(path) for path in config.plugins])
        raise_all(errors)
        experiment = OmegaConf.to_object(config)
        if not isinstance(experiment, Experiment):
            raise ConfigError("the launcher composed something else than an experiment", "this is a bug")
        overrides = [str(word) for word in HydraConfig.get().overrides.task]
        raise_all([*value_errors(experiment), *rules.check(experiment)])
        return Loaded(experiment, overrides, chosen(HydraConfig.get().runtime.choices), sources)

    def _failed(self, one: Member, error: str, trace: str = "") -> Outcome:
        """A failure goes into the ledger; what happened before the run had a log goes there too."""
        SweepFolder(self.folder).log("failed", one.path.name, error=error, **({"traceback": trace} if trace else {}))
        return Outcome("failed", one.path, error=error)

    def _ended(self, one: Member, result: Result) -> Outcome:
        loss = result.figures.get("val/loss")
        SweepFolder(self.folder).log(result.state, one.path.name, loss=loss, step=result.figures.get("step"))
        if result.exit_code > EXIT_FAILED and not self._in_child():
            raise KeyboardInterrupt
        good = result.state == "finished" and isinstance(loss, float) and math.isfinite(loss)
        error = "the loss or the weights are not finite" if result.state == "diverged" else None
        return Outcome(result.state, result.path, loss if good else None, error, result.figures.get("noncausal"))

    @staticmethod
    def _in_child() -> bool:
        import multiprocessing

        return multiprocessing.parent_process() is not None
