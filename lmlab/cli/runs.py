"""`lmlab runs ls | show | diff | upload`: what there is, one run in full, two side by side, W&B later. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from lmlab.cli.upload import upload

if TYPE_CHECKING:
    from pathlib import Path

    from lmlab.runs.rundir import RunDir
    from lmlab.runs.summary import RunSummary

Json = Annotated[bool, typer.Option("--json", help="JSON on stdout")]
Words = Annotated[Optional[list[str]], typer.Argument(metavar="[paths.runs=FOLDER]", help="where the runs lie")]
One = Annotated[Optional[list[str]], typer.Argument(metavar="RUN [paths.runs=FOLDER]", help="path, name or hash")]
Two = Annotated[Optional[list[str]], typer.Argument(metavar="RUN RUN [paths.runs=FOLDER]", help="path, name or hash")]
KEY = "paths.runs="
DATA = ("fingerprint", "tokenizer_hash")
LOSSES = ("/loss", "/bits_per_byte")
MISSING = "–"


def register(app: typer.Typer) -> None:
    runs = typer.Typer(help="List, show and compare runs.", no_args_is_help=True)
    runs.command("ls")(ls)
    runs.command("show")(show)
    runs.command("diff")(diff)
    runs.command("upload")(upload)
    app.add_typer(runs, name="runs")


def ls(words: Words = None, as_json: Json = False) -> None:
    """Every run, the newest first, with those set aside (.old-N) and those that older code made (stale)."""
    from lmlab.cli.tables import print_table
    from lmlab.runs.summary import summaries

    _, root = _split(words, 0)
    lines = list(summaries(root))
    for line, stale in zip(lines, _stale(lines), strict=True):
        line.stale = stale
    if as_json:
        _say_json([line.as_dict() for line in lines])
    elif lines:
        print_table(
            ("run", "state", "steps", "val bits/byte", "tokens/s", "age", "changes"), [_row(line) for line in lines]
        )
    else:
        _note(f"there are no runs in {root}")
    for line in lines:
        if line.problem:
            _note(f"warning: {line.problem}")


def show(words: One = None, as_json: Json = False) -> None:
    """One run: its configuration, manifest, result and last row of metrics."""
    from lmlab.runs import metrics, yamlio
    from lmlab.runs.find import find

    (run,), root = _split(words, 1)
    found = find(run, root)
    manifest, rows = found.manifest(), metrics.tail(found.metrics_path)
    result = manifest.pop("result", {})
    last = rows[-1] if rows else {}
    content: dict[str, Any] = {
        "run": found.name,
        "path": str(found.path),
        "state": found.state(),
        "config": found.config(),
    }
    content |= {"result": result, "last": last, "checkpoints": [ref.step for ref in found.checkpoints()]}
    if as_json:
        _say_json({**content, "manifest": manifest})
        return
    if (diff := (manifest.get("git") or {}).pop("diff", None)) is not None:
        manifest["git"]["diff"] = f"{len(diff.splitlines())} lines, in manifest.json"
    _say(yamlio.dumps({**content, "manifest": manifest}).rstrip("\n"))


def diff(words: Two = None, as_json: Json = False) -> None:
    """What differs between two runs: configuration, data, code, environment, results."""
    from lmlab.cli.tables import print_table
    from lmlab.runs.find import find
    from lmlab.runs.noncausal import recorded

    (a, b), root = _split(words, 2)
    first, second = find(a, root), find(b, root)
    sections = compare(first, second)
    if as_json:
        _say_json({"a": first.name, "b": second.name, **sections})
        return
    whys = [recorded(run.manifest()) for run in (first, second)]
    rows = [
        (where, key, *(_figure(key, value, why) for value, why in zip(pair, whys, strict=True)))
        for where, part in sections.items()
        for key, pair in part.items()
    ]
    if rows:
        print_table(("", "key", first.name, second.name), rows)
    else:
        _note("nothing differs: same configuration, data, code, environment and results")


def compare(a: RunDir, b: RunDir) -> dict[str, dict[str, tuple[Any, Any]]]:
    """{section: {key: (in a, in b)}} of everything that differs."""
    from lmlab.runs.manifest import ENVIRONMENT, facts
    from lmlab.runs.summary import differences, flatten

    old, new = a.manifest(), b.manifest()
    sections: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "config": (flatten(a.config()), flatten(b.config())),
        "data": ({k: old.get(k) for k in DATA}, {k: new.get(k) for k in DATA}),
        "code": ({**facts("git", old), **facts("code_hash", old)}, {**facts("git", new), **facts("code_hash", new)}),
        "environment": ({}, {}),
        "results": (flatten(old.get("result") or {}), flatten(new.get("result") or {})),
    }
    for name in ENVIRONMENT:
        if name not in ("git", "code_hash", *DATA):
            for manifest, part in zip((old, new), sections["environment"], strict=True):
                part.update(facts(name, manifest))
    return {name: differences(*pair) for name, pair in sections.items()}


# ---------------------------------------------------------------- reading


def _split(words: Sequence[str] | None, n_runs: int) -> tuple[list[str], Path]:
    """The runs named, which must be `n_runs`, and the folder that `paths.runs=` names."""
    from lmlab.errors import ConfigError
    from lmlab.opened import runs_root

    words = words or []
    runs = [word for word in words if not word.startswith(KEY)]
    if len(runs) != n_runs:
        wanted = ("no run", "one run", "two runs")[n_runs]
        given = f"{len(runs)} given: {' '.join(runs)}" if runs else "none given"
        raise ConfigError(
            f"this command takes {wanted}, {given}", "`lmlab runs ls` lists them; the only key is paths.runs=FOLDER"
        )
    return runs, runs_root(words)


def _stale(lines: Sequence[RunSummary]) -> list[bool | None]:
    """Whether other code made each run; None where that is not known. Data can't be told without preparing it."""
    from pathlib import Path

    from lmlab.config.identity import code_hash

    known: dict[tuple[tuple[str, str], ...], str] = {}
    stale: list[bool | None] = []
    for line in lines:
        sources = {path.name: path.read_text(errors="replace") for path in Path(line.path, "plugins").glob("*.py")}
        key = tuple(sorted(sources.items()))
        if line.code_hash and key not in known:
            known[key] = code_hash(sources)
        stale.append(known[key] != line.code_hash if line.code_hash else None)
    return stale


# ---------------------------------------------------------------- printing


def _row(line: RunSummary) -> tuple[str, ...]:
    from lmlab.runs.noncausal import labelled

    marks = [line.state, *(["stale"] if line.stale else []), *(["set aside"] if line.set_aside else [])]
    steps = MISSING if line.step is None else f"{line.step}/{line.steps}" if line.steps else str(line.step)
    bits = MISSING if line.val_bits_per_byte is None else labelled(f"{line.val_bits_per_byte:.4f}", line.noncausal)
    rate = MISSING if line.tokens_per_s is None else f"{line.tokens_per_s:,.0f}"
    return (
        line.name,
        ", ".join(marks),
        steps,
        bits,
        rate,
        _age(line.ended or line.started),
        " ".join(line.changes) or MISSING,
    )


def _age(moment: str | None) -> str:
    from datetime import UTC, datetime

    try:
        seconds = (datetime.now(UTC) - datetime.fromisoformat(moment or "")).total_seconds()
    except (TypeError, ValueError):
        return MISSING
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def _shown(value: Any) -> str:
    if value is None:
        return MISSING
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _figure(key: str, value: Any, why: str | None) -> str:
    """A value, labelled where it is a loss whose tokens saw later ones."""
    from lmlab.runs.noncausal import labelled

    return labelled(_shown(value), why if value is not None and key.endswith(LOSSES) else None)


def _say(text: str) -> None:
    from lmlab.cli.progress import say

    say(text)


def _say_json(value: Any) -> None:
    from lmlab.runs.files import to_json

    _say(to_json(value))


def _note(text: str) -> None:
    from lmlab.cli.progress import Screen

    Screen().note(text)
