"""`lmlab data`: what is prepared and can be chosen (`ls`); corpora into token files ahead of training (`prepare`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

if TYPE_CHECKING:
    from lmlab.data.prepare import Prepared

EPILOG = (
    "Examples: lmlab data prepare data=pycode tokenizer=byte · lmlab data prepare data=text data.files=[books/*.txt]"
)


def register(app: typer.Typer) -> None:
    data = typer.Typer(no_args_is_help=True, help="Corpora: what is prepared, and preparing one.")
    data.command("ls")(ls)
    data.command("prepare", epilog=EPILOG)(prepare)
    app.add_typer(data, name="data")


def ls(
    words: Annotated[Optional[list[str]], typer.Argument(metavar="[paths.cache=DIR]", help="another cache")] = None,
    config_dir: Annotated[Optional[str], typer.Option(metavar="DIR", help="a conf/ folder of your own")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON on stdout")] = False,
) -> None:
    """Prepared corpora, and the corpora and tokenizers that can be chosen."""
    from lmlab.config import catalogue
    from lmlab.data.prepare import cache_dir

    cache = cache_dir(_cache_of(words or []))
    user = catalogue.user_conf(config_dir)
    choices = {g: {e.label: e.help for e in catalogue.entries(g, user).values()} for g in ("data", "tokenizer")}
    rows = prepared_rows(cache)
    if as_json:
        typer.echo(json.dumps({"cache": str(cache), "prepared": rows, "choices": choices}))
        return
    _print_tables(cache, rows, choices)


def prepare(
    overrides: Annotated[
        Optional[list[str]], typer.Argument(metavar="[KEY=VALUE]...", help="data=…, tokenizer=… and their fields")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="make it again, whatever the cache holds")] = False,
    config_dir: Annotated[Optional[str], typer.Option(metavar="DIR", help="a conf/ folder of your own")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the result as JSON on stdout")] = False,
) -> None:
    """Prepare a corpus now; `lmlab train` does the same when it is needed."""
    from lmlab.cli.progress import Screen
    from lmlab.config.load import load
    from lmlab.config.mixing import parts
    from lmlab.data.prepare import cache_dir
    from lmlab.data.source import Place, open_source
    from lmlab.errors import ConfigError
    from lmlab.inherit import refuse_run

    refuse_run(overrides or [], "lmlab data prepare")
    exp = load(overrides or [], config_dir=config_dir).experiment
    with Screen().preparing() as progress:
        mixture = parts(exp.data)
        place = Place(cache_dir(exp.paths.cache), exp.model.seq_len, progress, force, parts=mixture)
        corpora = open_source(exp.data, exp.tokenizer, place).corpora
    if not corpora:
        raise ConfigError(
            f"`data={exp.data.name}` has nothing to prepare: its examples are drawn while a run trains",
            f"lmlab train data={exp.data.name}",
        )
    for done in corpora:
        _print_prepared(done, as_json=as_json)


def _print_prepared(done: Prepared, *, as_json: bool) -> None:
    folder = done.train.path.parent
    if as_json:
        typer.echo(json.dumps({**done.info, "folder": str(folder)}))
        return
    about = done.info["tokenizer"]
    typer.echo(
        f"{done.info['corpus']} · tokenizer {about['name']} {about['vocab_size']} · {done.fingerprint} · {folder}"
    )
    for split, n in done.info["splits"].items():
        typer.echo(
            f"  {split:<6}{n['documents']:>10,} documents {n['bytes']:>15,} bytes {n['tokens']:>14,} tokens"
            f"  {n['bytes_per_token']:.3f} bytes/token"
        )
    if not about["lossless"]:
        typer.echo(f"  no bits per byte: the tokenizer is not lossless ({about['lossy_why']})")


def prepared_rows(cache: Path) -> list[dict[str, Any]]:
    """One row per prepared corpus in `cache`, by name; those that can't be read say so."""
    rows = []
    for folder in sorted(cache.glob("data/[!.]*/")):
        size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        try:
            info = json.loads((folder / "info.json").read_text(encoding="utf-8"))
            rows.append(_row(info, folder, size))
        except (OSError, ValueError, KeyError):
            rows.append({"corpus": "damaged", "folder": str(folder), "disk_bytes": size})
    return sorted(rows, key=lambda row: (row["corpus"], row["folder"]))


def _row(info: dict[str, Any], folder: Path, size: int) -> dict[str, Any]:
    splits, about = info["splits"].values(), info["tokenizer"]
    return {
        "corpus": info["corpus"],
        "version": info["version"],
        "tokenizer": about["name"],
        "vocab_size": about["vocab_size"],
        "tokens": sum(s["tokens"] for s in splits),
        "bytes": sum(s["bytes"] for s in splits),
        "fingerprint": info["fingerprint"],
        "disk_bytes": size,
        "folder": str(folder),
    }


def _cache_of(words: list[str]) -> str | None:
    from lmlab.errors import ConfigError

    for word in words:
        if not word.startswith("paths.cache="):
            raise ConfigError(f"`lmlab data ls` takes no `{word}`", "only paths.cache=DIR can be set here")
    return words[-1].partition("=")[2] if words else None


def _print_tables(cache: Path, rows: list[dict[str, Any]], choices: dict[str, dict[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    table = Table(title=f"prepared in {cache}", title_justify="left", box=None, pad_edge=False)
    for name in ("corpus", "tokenizer", "tokens", "bytes", "hash", "on disk"):
        table.add_column(name, justify="right" if name in ("tokens", "bytes", "on disk") else "left", no_wrap=True)
    for row in rows:
        disk = f"{row['disk_bytes'] / 1e6:,.1f} MB"
        if "tokens" not in row:
            table.add_row("damaged", "", "", "", Path(row["folder"]).name, disk)
            continue
        version = f" {row['version']}" if row["version"] else ""
        tokenizer = f"{row['tokenizer']} {row['vocab_size']}"
        counts = (f"{row['tokens']:,}", f"{row['bytes']:,}")
        table.add_row(row["corpus"] + version, tokenizer, *counts, row["fingerprint"][:8], disk)
    console.print(table if rows else f"nothing is prepared in {cache}")
    for group, options in choices.items():
        console.print(f"\n{group}=", style="bold")
        for label, help in options.items():
            console.print(f"  {label:<14}{help}", markup=False, overflow="ellipsis", no_wrap=True)
