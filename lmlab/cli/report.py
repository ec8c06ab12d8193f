"""`lmlab report`: compare runs. Tables, differences to a baseline, confounds, curves. Torch-free."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from lmlab.report.model import Report

FORMATS = ("terminal", "md", "html", "csv", "json", "svg", "pdf")
FIGURES = ("svg", "pdf")
ONE_TEXT = ("md", "csv", "json")
KEY = "paths.runs="
EPILOG = (
    "Examples: lmlab report · lmlab report runs/sweeps/norm-1a2b3c4d --baseline norm=rmsnorm · "
    "lmlab report 1a2b 5e6f --format md --out - · lmlab report --bundle out.zip · lmlab report out.zip"
)


def register(app: typer.Typer) -> None:
    app.command("report", epilog=EPILOG)(report)


def report(
    words: Annotated[
        Optional[list[str]],
        typer.Argument(metavar="[RUN|SWEEP|FOLDER|ZIP]... [paths.runs=FOLDER]", help="none: the newest sweep, or all"),
    ] = None,
    baseline: Annotated[
        Optional[str], typer.Option("--baseline", metavar="RUN|KEY=VALUE", help="what the others are compared with")
    ] = None,
    formats: Annotated[
        Optional[str],
        typer.Option("--format", metavar="LIST", help=f"of {','.join(FORMATS)}; without: terminal,html"),
    ] = None,
    out: Annotated[
        Optional[str], typer.Option("--out", metavar="DIR|-", help="where the files go; - prints one md, csv or json")
    ] = None,
    bundle: Annotated[
        Optional[str], typer.Option("--bundle", metavar="FILE.zip", help="the runs' small files, to report elsewhere")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout in place of the table")] = False,
) -> None:
    """Compare runs: what differs between them and only that, figures over seeds, confounds, loss curves."""
    from lmlab.config.identity import outside_identity
    from lmlab.errors import ConfigError
    from lmlab.report.build import build
    from lmlab.report.bundle import pack
    from lmlab.report.sources import opened

    kinds = wanted(formats, out, as_json)
    names, root = split(words or [])
    zip_path = bundle_path(bundle) if bundle is not None else None
    if baseline is not None and not baseline.strip():
        raise ConfigError("`--baseline` is empty", "give a run or words, as in --baseline norm=layernorm")
    with opened(names, root) as selection:
        made = build(selection, outside_identity, baseline=baseline, hash_of=hash_of)
        to_stdout(made, kinds, out, as_json)
        files = set(kinds) - {"terminal"} and out != "-"
        written = write(made, kinds, place(out, root, slug(made.title, names))) if files else []
        if zip_path is not None:
            written.append(pack(zip_path, selection, made))
    for path in written:
        _note(f"written: {path}")


# ---------------------------------------------------------------- what is asked for


def wanted(formats: str | None, out: str | None, as_json: bool) -> list[str]:
    """The formats, checked against each other. Raises ConfigError."""
    from lmlab.errors import ConfigError, listed, nearest

    given = [word for word in re.split(r"[,\s]+", formats or "") if word]
    for word in given:
        if word not in FORMATS:
            guess = nearest(word, FORMATS)
            hint = f"did you mean {guess}?" if guess else f"formats: {listed(FORMATS)}"
            raise ConfigError(f"`--format` has {word}, which is no format", hint)
    if formats is not None and not given:
        raise ConfigError("`--format` is empty", f"formats: {listed(FORMATS)}")
    if out != "-":
        return given or ([] if as_json else ["terminal", "html"])
    if as_json and given in ([], ["json"]):
        return []
    if as_json or len(given) != 1 or given[0] not in ONE_TEXT:
        said = "--json" if as_json else f"--format {','.join(given)}" if given else "no --format"
        raise ConfigError(
            f"`--out -` prints one of {', '.join(ONE_TEXT)} on stdout; given: {said}",
            "for example --format md --out -; files go to a folder: --out DIR",
        )
    return given


def hash_of(config: dict[str, Any]) -> str | None:
    """The hash of a configuration as config.yaml holds it; None where it can't be told: plug-ins, another lmlab."""
    from lmlab.config.identity import config_hash, from_dict
    from lmlab.errors import LmlabError

    try:
        return config_hash(from_dict(config))
    except (LmlabError, ValueError, TypeError, AttributeError):
        return None


def split(words: Sequence[str]) -> tuple[list[str], Path]:
    """The words that name runs, and the folder that `paths.runs=` names."""
    from pathlib import Path

    from lmlab.errors import ConfigError
    from lmlab.opened import runs_root

    names = [word for word in words if not word.startswith(KEY)]
    for word in names:
        if "=" in word and not Path(word).exists():
            hint = "the only key is paths.runs=FOLDER; `--baseline key=value` chooses what the others are compared with"
            raise ConfigError(f"`{word}` is no run, sweep, folder or bundle", hint)
    return names, runs_root(words)


def bundle_path(text: str) -> Path:
    from pathlib import Path

    from lmlab.errors import ConfigError

    path = Path(text).expanduser()
    if path.suffix != ".zip":
        raise ConfigError(f"`--bundle` is {text}", "a bundle is a .zip file: --bundle out.zip")
    return path


# ---------------------------------------------------------------- writing


def place(out: str | None, root: Path, name: str) -> Path:
    """The folder of the files, made now: `--out`, else runs/reports/<name>. Raises RunError when it can't be."""
    from pathlib import Path

    from lmlab.errors import RunError

    folder = Path(out).expanduser() if out is not None else root / "reports" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"can't write to {folder}: {error.strerror}", "name another folder: --out DIR") from error
    return folder


def slug(title: str, names: Sequence[str]) -> str:
    """A title as a folder's name; of a mixture with a hash of what was named, so that two mixtures don't meet."""
    text = re.sub(r"[^A-Za-z0-9._+]+", "-", title).strip("-.")[:80] or "report"
    mark = hashlib.blake2b(" ".join(sorted(names)).encode(), digest_size=4).hexdigest()
    return text if len(names) < 2 else f"{text}-{mark}"


def write(made: Report, kinds: Sequence[str], folder: Path) -> list[Path]:
    """Every file of these formats; returns their paths. Raises RunError when one can't be written."""
    from lmlab.errors import RunError

    written = []
    try:
        for name, text in texts(made, kinds):
            path = folder / name
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            written.append(path)
        if figures := [kind for kind in kinds if kind in FIGURES]:
            from lmlab.report.figures import draw

            written += draw(made, folder, figures)
    except OSError as error:
        where = error.filename or folder
        raise RunError(f"can't write {where}: {error.strerror or error}", "name another folder: --out DIR") from error
    return written


def texts(made: Report, kinds: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(file name, content) of each text format asked for."""
    from lmlab.report import markdown, plain

    if "html" in kinds:
        from lmlab.report import page

        yield "report.html", page.render(made)
    if "md" in kinds:
        yield "report.md", markdown.render(made)
    if "csv" in kinds:
        yield "arms.csv", plain.arms_csv(made)
        yield "runs.csv", plain.runs_csv(made)
    if "json" in kinds:
        yield "report.json", plain.as_json(made)


def to_stdout(made: Report, kinds: Sequence[str], out: str | None, as_json: bool) -> None:
    """What goes to stdout: JSON, the one text of `--out -`, or the table."""
    from lmlab.cli.progress import say

    if as_json or out == "-":
        _, text = next(texts(made, ["json"] if as_json else kinds))
        say(text.rstrip("\n"))
    elif "terminal" in kinds:
        from lmlab.cli.tables import stdout
        from lmlab.report.terminal import show

        show(made, stdout())


def _note(text: str) -> None:
    from lmlab.cli.progress import Screen

    Screen().note(text)
