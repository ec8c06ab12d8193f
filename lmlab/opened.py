"""A run opened again: its experiment with its own plug-ins, and its model with the weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmlab.config.tree import Experiment
from lmlab.errors import DataError, RunError
from lmlab.runs.rundir import RunDir

if TYPE_CHECKING:
    import torch

    from lmlab.data.source import Source
    from lmlab.data.tokenizer import Tokenizer
    from lmlab.model.transformer import Transformer
    from lmlab.runs.checkpoint import Checkpoint

IMPORTED = "imported"
UNFINISHED = ("interrupted", "stopped", "failed")


def runs_root(words: Sequence[str]) -> Path:
    """The folder of runs that a typed `paths.runs=` names, else the default one."""
    typed = next((word.partition("=")[2] for word in words if word.startswith("paths.runs=")), "runs")
    return Path(typed).expanduser()


def experiment_of(run: RunDir) -> Experiment:
    """What the run trained, its plug-ins imported from the run's own copies."""
    from lmlab.config.identity import from_dict

    _import_plugins(run)
    exp = from_dict(run.config())
    exp.plugins = [str(path) for path in run.plugins()]
    exp.paths.runs = str(run.path.parent)
    files, cwd = getattr(exp.data, "files", []), run.manifest().get("cwd")
    if files and cwd:  # relative names start where the run was started
        exp.data.files = [str(Path(cwd, Path(name).expanduser())) for name in files]  # type: ignore[attr-defined]
    return exp


def ends_of(run: RunDir, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end a text: end-of-text, and in a model trained here what the next document begins with."""
    imported = run.manifest().get("state") == IMPORTED
    return (tokenizer.eot,) if imported else tuple(dict.fromkeys((tokenizer.eot, tokenizer.start)))


def _import_plugins(run: RunDir) -> None:
    """The run's own copies, each once per process."""
    from lmlab.config.parse import import_plugins
    from lmlab.errors import raise_all

    _, errors = import_plugins([str(path) for path in run.plugins()])
    raise_all(errors)


def refuse_imported(run: RunDir, doing: str) -> None:
    """Raises RunError for a run whose weights came from elsewhere: it has no training that could be gone on with."""
    manifest = run.manifest()
    if manifest.get("state") == IMPORTED:
        source = manifest.get("imported", {}).get("source")
        raise RunError(
            f"{run.name} was imported from {source}, not trained here: there is nothing to {doing}",
            f"train on from its weights: `lmlab train --from {run.name}`",
        )


def refuse_edited(run: RunDir) -> None:
    """Raises RunError when config.yaml is not what the run's newest checkpoint was trained with."""
    from lmlab.config.identity import config_hash, from_dict
    from lmlab.runs.meta import read_meta

    _import_plugins(run)  # both name parts that only these know

    refs = run.checkpoints()
    if refs and config_hash(from_dict(read_meta(refs[-1].path)["config"])) != config_hash(from_dict(run.config())):
        raise RunError(
            f"{run.path / 'config.yaml'} is not what its checkpoints were trained with",
            "restore it (each checkpoint's meta.json holds it), or train the changed experiment by its own command",
        )


def own_tokenizer(run: RunDir, exp: Experiment) -> Path | None:
    """The folder of the run's own tokenizer where its weights came with one, None where the experiment makes it."""
    return None if exp.init.source is None else run.tokenizer_path


def prepared(exp: Experiment, tokenizer: Path | None, progress: Callable[[str, float | None], None]) -> Source:
    """The experiment's data, by the tokenizer in that folder, or by the one that the experiment makes (None)."""
    from lmlab.config.mixing import parts
    from lmlab.data.prepare import cache_dir
    from lmlab.data.source import Place, open_source
    from lmlab.data.tokenizer import Tokenizer

    trained = None if tokenizer is None else Tokenizer.load(tokenizer)
    place = Place(cache_dir(exp.paths.cache), exp.model.seq_len, progress, trained=trained, parts=parts(exp.data))
    return open_source(exp.data, exp.tokenizer, place)


def refuse_other_data(run: RunDir, prepared: Source) -> None:
    """Raises DataError when the run's corpus gives other tokens than it was trained on."""
    then = run.manifest().get("fingerprint")
    if prepared.fingerprint != then:
        raise DataError(
            f"the data of {run.name} is not what it was trained on: fingerprint {prepared.fingerprint}, then {then}",
            "bring back the same corpus; `lmlab eval` can be given other data: data=…",
        )


def checkpoint_of(
    run: RunDir, ref_path: Path | None = None, note: Callable[[str], None] = lambda text: None
) -> Checkpoint:
    """The named checkpoint, or the newest undamaged one; `note` hears of damaged ones. Raises RunError without any."""
    from lmlab.runs import checkpoint

    found = checkpoint.load(ref_path) if ref_path is not None else checkpoint.latest_good(run.path, note)
    if found is None:
        raise RunError(f"{run.path} has no checkpoint yet", "train it first: `lmlab train --resume " + run.name + "`")
    return found


def computed_model(
    exp: Experiment, checkpoint: Checkpoint, tokenizer: Tokenizer, *, device: torch.device, dtype: torch.dtype
) -> Transformer:
    """The model as it computes: weights in `dtype` on `device`, in eval mode, compiled when the experiment says so.

    An imported embedding may have more rows than the tokenizer has ids: all are its vocabulary."""
    from lmlab.kernels.resolve import resolve
    from lmlab.model.transformer import build
    from lmlab.train.device import compile_wanted, resolve_residual
    from lmlab.train.twin import cast_parameters

    vocab_size = exp.arch.vocab_size(tokenizer.vocab_size, len(checkpoint.model["embed.weight"]))
    compiled, residual = compile_wanted(exp.compile, device), resolve_residual(exp.train.residual_dtype, dtype)
    ops = resolve(exp.kernels, device, dtype, residual, compiled=compiled)
    model = build(exp.arch, vocab_size, ops, seed=None, device=device)
    try:
        model.load_state_dict(checkpoint.model, strict=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise RunError(
            f"{checkpoint.path} does not fit its own configuration: {reason}", "it was made by other code"
        ) from error
    model = cast_parameters(model, dtype).eval()
    if compiled:
        model.compile_blocks()
    return model
