"""What Python users call: `lmlab.load(run)` and `lmlab.results(path)`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

    from lmlab.data.tokenizer import Tokenizer
    from lmlab.model.transformer import Transformer
    from lmlab.runs.rundir import RunDir


def load(
    run: str | Path | RunDir | None = None, *, root: str | Path = "runs", device: str = "cpu"
) -> tuple[Transformer, Tokenizer, dict[str, Any]]:
    """Model (fp32, eval mode), tokenizer and configuration of a run's newest undamaged checkpoint.

    run: a path (of one checkpoint, too), a directory's name, a run's name, or 4 or more characters of its hash; None is
    the newest finished or imported run in `root`. Reads the run's directory only. Raises RunError, ConfigError.
    """
    import torch

    from lmlab.data.tokenizer import Tokenizer
    from lmlab.opened import checkpoint_of, computed_model, experiment_of
    from lmlab.runs.find import Found, resolve
    from lmlab.runs.rundir import RunDir

    found = Found(run) if isinstance(run, RunDir) else resolve(run, Path(root))
    experiment = experiment_of(found.run)
    experiment.compile = False
    tokenizer = Tokenizer.load(found.run.tokenizer_path)
    checkpoint = checkpoint_of(found.run, found.checkpoint.path if found.checkpoint else None)
    model = computed_model(experiment, checkpoint, tokenizer, device=torch.device(device), dtype=torch.float32)
    return model, tokenizer, found.run.config()


def results(path: str | Path = "runs") -> pandas.DataFrame:
    """One row per run: `run`, `state`, `hash`, its configuration by dotted key (`norm`, `norm.eps`, `optim.lr`, …), the
    figures of its result (`val/loss`, …), why it is not causal (`noncausal`, else None), and where it lies.

    path: a folder of runs, or one run. Runs set aside are left out unless one is named. Never imports torch.
    """
    import pandas

    from lmlab.errors import RunError
    from lmlab.runs.find import list_runs
    from lmlab.runs.rundir import RunDir
    from lmlab.runs.summary import flatten, summarise

    path = Path(path)
    if not path.is_dir():
        raise RunError(f"there is no folder {path}", "give a folder of runs, or one run's directory")
    rows = []
    for run in [RunDir(path)] if RunDir(path).exists() else list_runs(path, set_aside=False):
        line = summarise(run)
        try:
            config = flatten(run.config())
        except RunError as error:
            config, line.problem = {}, line.problem or error.message
        config.pop("version", None)
        figures = {"step": line.step, "val/loss": line.val_loss, "val/bits_per_byte": line.val_bits_per_byte}
        figures |= {"tokens_per_s": line.tokens_per_s, **line.result}
        own = {"run": line.name, "state": line.state, "hash": line.hash}
        about = {"noncausal": line.noncausal, "problem": line.problem, "path": line.path}
        rows.append({**own, **config, **figures, **about})
    return pandas.DataFrame(rows)
