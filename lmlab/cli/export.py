"""`lmlab export`: a run's model as a Hugging Face folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from lmlab.cli.progress import Screen
    from lmlab.interop.exporting import Model
    from lmlab.runs.find import Found


def register(app: typer.Typer) -> None:
    app.command(
        "export", epilog="Examples: lmlab export --to ./mine · lmlab export 1a2b3c4d --to ./mine --dtype bfloat16"
    )(export_run)


def export_run(
    words: Annotated[
        Optional[list[str]],
        typer.Argument(metavar="[RUN] [paths.runs=FOLDER]", help="path, name or hash; none = the newest that is done"),
    ] = None,
    to: Annotated[Optional[str], typer.Option("--to", metavar="DIR", help="an empty or new folder")] = None,
    family: Annotated[
        Optional[str], typer.Option(metavar="NAME", help="llama, gpt2, …; none = the first that fits")
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="float32|bfloat16", help="of the weights")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="the result as JSON on stdout")] = False,
) -> None:
    """Write a run's model as transformers reads it: config.json, model.safetensors, tokenizer.json.

    `lmlab import` reads it back bit for bit; what no family of transformers can express is refused by name."""
    import dataclasses

    from lmlab.cli.progress import Screen, say
    from lmlab.errors import ConfigError
    from lmlab.interop.exporting import export
    from lmlab.opened import runs_root
    from lmlab.runs.files import to_json
    from lmlab.runs.find import resolve

    words = words or []
    names = [w for w in words if not w.startswith("paths.runs=")]
    if len(names) > 1 or any("=" in name for name in names):
        raise ConfigError(f"`lmlab export` takes one RUN, not {' '.join(names)}", "the only key is paths.runs=FOLDER")
    if to is None:
        raise ConfigError("`--to` is not given", "name a folder that is empty, or not there yet: --to DIR")
    screen = Screen()
    found = resolve(names[0] if names else None, runs_root(words))
    if not names:
        screen.note(f"newest {found.run.state()} run: {found.run.path}")
    done = export(model_of(found, screen), Path(os.path.expanduser(to)), family=family, dtype=dtype)
    if as_json:
        say(to_json(dataclasses.asdict(done) | {"run": str(found.run.path)}))
    else:
        say(f"exported  {done.folder}  {done.cls} ({done.family}), {done.parameters:,} parameters, {done.dtype}")


def model_of(found: Found, screen: Screen) -> Model:
    """The run's newest undamaged checkpoint, or the named one."""
    from lmlab.data.tokenizer import Tokenizer
    from lmlab.interop.exporting import Model
    from lmlab.opened import checkpoint_of, experiment_of

    run, arch = found.run, experiment_of(found.run).arch
    checkpoint = checkpoint_of(run, found.checkpoint.path if found.checkpoint else None, screen.warn)
    facts = run.manifest().get("imported") or {}
    longest = facts.get("max_position_embeddings") or arch.model.seq_len
    settings = facts.get("tokenizer_config") or {}
    return Model(arch, checkpoint.model, Tokenizer.load(run.tokenizer_path), longest, settings)
