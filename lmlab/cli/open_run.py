"""A run opened for what does not train: its checkpoint, its tokenizer, the device and the precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from lmlab.cli.progress import Screen
    from lmlab.config.tree import Experiment
    from lmlab.data.tokenizer import Tokenizer
    from lmlab.model.transformer import Transformer
    from lmlab.runs.checkpoint import Checkpoint
    from lmlab.runs.find import Found
    from lmlab.runs.rundir import RunDir


@dataclass
class Opened:
    """A run as it is evaluated, with what was typed in `exp`. rows: of a batch, as training took them."""

    run: RunDir
    exp: Experiment
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    device: torch.device
    dtype: torch.dtype
    rows: int

    def model(self) -> Transformer:
        """In eval mode."""
        from lmlab.opened import computed_model

        return computed_model(self.exp, self.checkpoint, self.tokenizer, device=self.device, dtype=self.dtype)

    def told(self) -> dict[str, Any]:
        """What computed the figures of a report."""
        own = {"step": self.checkpoint.step, "content_hash": self.checkpoint.content_hash}
        precision = str(self.dtype).removeprefix("torch.")
        return own | {"kernels": self.exp.kernels.name, "precision": precision, "device": str(self.device)}


def refuse_keys(words: Sequence[str], may_set: Sequence[str], when: str) -> None:
    """Raises Errors for `key=value` words of other keys than those that may be set, and what is below them."""
    from lmlab.errors import ConfigError, raise_all

    keys = [word.partition("=")[0] for word in words]
    refused = [k for k in keys if not any(k == own or k.startswith(f"{own}.") for own in may_set)]
    hint = f"keys that may be set: {', '.join(may_set)}"
    raise_all([ConfigError(f"`{key}` can't be changed at {when}", hint) for key in refused])


def open_run(
    found: Found,
    keys: list[str],
    config_dir: str | None,
    screen: Screen,
    *,
    precision: str | None = None,
    cpu_precision: str | None = None,
) -> Opened:
    """The named checkpoint, or the newest undamaged one. precision, and on a CPU cpu_precision: what holds instead of
    the run's own, unless one is typed."""
    from lmlab.config.amend import amend
    from lmlab.data.tokenizer import Tokenizer
    from lmlab.opened import checkpoint_of, experiment_of
    from lmlab.train.device import be_deterministic, resolve_device, resolve_precision

    run = found.run
    exp = amend(experiment_of(run), keys, config_dir=config_dir).experiment if keys else experiment_of(run)
    checkpoint = checkpoint_of(run, found.checkpoint.path if found.checkpoint else None, screen.warn)
    tokenizer = Tokenizer.load(run.tokenizer_path)
    device = resolve_device(exp.device)
    be_deterministic(device)
    rows = min(run.manifest().get("resolved", {}).get("micro_batch", 8), 64)
    typed = any(key.startswith("train.precision=") for key in keys)
    instead = cpu_precision if device.type == "cpu" and cpu_precision else precision
    dtype = resolve_precision(exp.train.precision if typed or instead is None else instead, device)
    return Opened(run, exp, checkpoint, tokenizer, device, dtype, rows)
