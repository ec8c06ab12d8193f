"""`lmlab import`: a Hugging Face folder becomes a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

if TYPE_CHECKING:
    from lmlab.cli.progress import Screen
    from lmlab.interop.importing import Import

EPILOG = "Examples: lmlab import ./Llama-3.2-1B · lmlab import openai-community/gpt2 data=sotu model.seq_len=512"


def register(app: typer.Typer) -> None:
    app.command("import", epilog=EPILOG)(import_model)


def import_model(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="a folder of save_pretrained, or a name on the hub")],
    words: Annotated[
        Optional[list[str]], typer.Argument(metavar="KEY=VALUE", help="what is no part of the model: data, train, …")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the result as JSON on stdout")] = False,
) -> None:
    """Make a run of a model of others: GPT-2, Llama, Mistral, Gemma, Qwen, OLMo 2, NeoX, BLOOM, Phi, DeepSeek (dense).

    Its configuration is translated into lmlab's words, or refused by name where they can't express it; weights are read
    from safetensors only. The run is evaluated and checked like one that was trained here."""
    from lmlab.cli.progress import Screen, say
    from lmlab.config.parse import KEY
    from lmlab.errors import ConfigError
    from lmlab.interop.importing import import_folder
    from lmlab.runs.files import to_json

    key, equals, _ = source.partition("=")
    if equals and KEY.match(key) and not Path(os.path.expanduser(source)).exists():
        raise ConfigError(f"`lmlab import` takes a SOURCE first, not {source}", "lmlab import FOLDER " + source)
    screen = Screen()
    made = import_folder(source, words or [], sys.argv)
    if as_json:
        say(to_json(_summary(made)))
    else:
        _tell(made, screen)
        say(f"imported  {made.run.path}" + ("  (it was there already)" if made.existed else ""))


def _summary(made: Import) -> dict[str, Any]:
    found = {"state": "imported", "run": str(made.run.path), "family": made.family, "words": made.words}
    return found | {"parameters": made.parameters, "dtypes": made.dtypes, "notes": made.notes, "existed": made.existed}


def _tell(made: Import, screen: Screen) -> None:
    from lmlab.compat.model import remarks

    exp = made.loaded.experiment
    rows = [
        ("family", made.family),
        ("words", "  ".join(made.words)),
        ("model", f"{made.parameters:,} parameters, rows of {exp.model.seq_len} (model.seq_len)"),
        ("weights", f"{' and '.join(made.dtypes)}, kept as float32"),
    ]
    screen.block(str(made.run.path), rows)
    for remark in (*made.notes, *remarks(exp)):
        screen.note(remark)
