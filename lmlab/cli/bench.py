"""`lmlab bench`: speed and memory against this machine's limits and against other libraries, in turns."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

if TYPE_CHECKING:
    from lmlab.bench.result import Result

KINDS = {
    "train": "a composition: tokens/s, MFU, where a step's time goes, memory, the price of composing",
    "variants": "every option of every group beside the default, at equal FLOPs",
    "decode": "prompts read and tokens written by attention and batch, and what bounds each",
    "kernels": "operations that move memory, against a copy; the loss, against a product; auto, plain and compiled",
    "attn": "backends of attention × tokens × mask, against a matrix product; what auto picks",
    "peers": "transformers, litgpt, x-transformers and a nanoGPT at the same shapes",
}
MODEL = ("model.n_layers", "model.d_model", "model.n_heads", "model.seq_len", "attn.n_kv_heads", "ffn.d_ff")
COMMON = ("tokenizer", "train.batch_tokens", "train.precision", "device", "seed", "paths")
PARTS = ("norm", "block", "pos", "rope_scaling", "attn", "ffn", "moe", "model", "data", "preset", "plugins")
STEP = ("optim", "kernels", "compile", "train.micro_batch", "train.residual_dtype", "train.activation_checkpointing")
RUN_ON = ("train.batch_tokens", "train.precision", "device", "paths")
HEADS = ("model.d_model", "model.n_heads", "model.seq_len", "attn.head_dim", "attn.n_kv_heads")
MAY_SET = {
    "train": ((*PARTS, *STEP, *COMMON), ", which takes single steps"),
    "variants": ((*PARTS, *STEP, *COMMON), ", which takes single steps"),
    "decode": ((*PARTS, *COMMON), ", which compares kernels and trains nothing"),
    "peers": (("model", "data", *MODEL, *COMMON, "kernels", "compile", "optim.lr"), ", whose parts are its peers'"),
    "kernels": (("model.d_model", "tokenizer.vocab_size", *RUN_ON), ", which measures every part"),
    "attn": ((*HEADS, *RUN_ON), ", which measures every backend and mask"),
}
EPILOG = " · ".join(f"{kind}: {what}" for kind, what in KINDS.items())


def register(app: typer.Typer) -> None:
    app.command("bench", epilog=EPILOG)(bench)


def bench(
    kind: Annotated[str, typer.Argument(metavar="|".join(KINDS), help="what is measured", show_default=False)],
    overrides: Annotated[
        Optional[list[str]], typer.Argument(metavar="KEY=VALUE", help="what to change from the default")
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, metavar="N", help="turns that each contender takes")] = 7,
    out: Annotated[Optional[str], typer.Option(metavar="DIR", help="where JSON and figure go (runs/bench)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="everything measured, as JSON on stdout")] = False,
) -> None:
    """Measure here and now: contenders take turns, ratios are taken within a turn and printed with their spread."""
    import importlib
    from pathlib import Path

    from lmlab.bench.result import make_folder, save
    from lmlab.cli.open_run import refuse_keys
    from lmlab.cli.progress import Screen
    from lmlab.errors import ConfigError, nearest
    from lmlab.opened import runs_root

    words = overrides or []
    if kind not in KINDS:
        guess = nearest(kind, list(KINDS))
        raise ConfigError(f"`{kind}` is not a benchmark", f"use {guess or ', '.join(KINDS)}")
    refuse_words(words)
    keys, why = MAY_SET[kind]
    refuse_keys(words, keys, f"`lmlab bench {kind}`{why}")
    if kind == "peers":
        refuse_fields(words)
    screen, folder = Screen(), Path(out).expanduser() if out is not None else runs_root(words) / "bench"
    make_folder(folder)  # before anything is measured
    signal.signal(signal.SIGTERM, stopped)
    result = importlib.import_module(f"lmlab.bench.{kind}").run(words, rounds=rounds, said=screen.note)
    show(result, as_json)
    paths = save(result, folder)
    screen.note(f"wrote {', '.join(map(str, paths))}")


def refuse_words(words: Sequence[str]) -> None:
    """Raises ConfigError for an argument that sets nothing."""
    from lmlab.errors import ConfigError, raise_all

    stray = [word for word in words if "=" not in word]
    raise_all(
        [ConfigError(f"`{word}` is no key=value", "`lmlab bench --help` lists what is measured") for word in stray]
    )


def refuse_fields(words: Sequence[str]) -> None:
    """Raises ConfigError for settings that peers would not have: their models and batches have sizes, no more."""
    from lmlab.cli.open_run import refuse_keys

    own = [word for word in words if word.startswith(("model.", "data."))]
    refuse_keys(own, (*MODEL, "data.files", "data.field"), "`lmlab bench peers`, where peers have sizes alone")


def stopped(number: int, frame: Any) -> None:
    """SIGTERM: contenders are ended with their parent."""
    from lmlab.errors import EXIT_SIGTERM, LmlabError

    error = LmlabError("stopped by SIGTERM")
    error.exit_code = EXIT_SIGTERM
    raise error


def show(result: Result, as_json: bool) -> None:
    from lmlab.cli.tables import print_table
    from lmlab.runs.files import to_json

    if as_json:
        print(to_json(result.as_dict()))
        return
    table: Any = result.table
    print_table(result.head, table)
    print()
    for line in result.said:
        print(line)
