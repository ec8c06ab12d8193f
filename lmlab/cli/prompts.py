"""The prompts of `lmlab generate`: the one that is typed, or a file of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from lmlab.errors import ConfigError, DataError

MAX_PROMPTS = 4096
AS_JSON = 'write {"prompt": "…"} in each line'
LINE_END = re.compile(r"\r?\n")  # str.splitlines() also cuts at form feeds and U+2028, which are part of a prompt


def read_prompts(prompt: str | None, file: str | None) -> list[str]:
    """The prompts that were typed or that the file holds. Raises ConfigError, DataError."""
    if (prompt is None) == (file is None):
        what = "neither --prompt nor --prompts is given" if prompt is None else "--prompt and --prompts are both given"
        raise ConfigError(what, 'give one of them: --prompt "Fellow citizens" or --prompts FILE')
    if prompt is not None:
        return [prompt]
    assert file is not None
    as_json = Path(file).suffix.lower() == ".jsonl"
    found = [
        _prompt(file, number, line) if as_json else line
        for number, line in enumerate(_lines(file), start=1)
        if line.strip()
    ]
    if not 1 <= len(found) <= MAX_PROMPTS:
        raise DataError(f"`--prompts` {file} has {len(found):,} prompts", f"give 1 to {MAX_PROMPTS:,} of them")
    return found


def _lines(file: str) -> list[str]:
    r"""Those of a UTF-8 file, with or without a byte order mark, that end with \n or \r\n."""
    try:
        text = Path(file).expanduser().read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8: {error.reason}"
        raise DataError(f"`--prompts` {file} can't be read: {reason}", "give a text file, a prompt a line") from error
    return LINE_END.split(text)


def _prompt(file: str, number: int, line: str) -> str:
    """Of a line of .jsonl. Raises DataError."""
    where = f"`--prompts` {file}, line {number}"
    try:
        content = json.loads(line, object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise DataError(f"{where} is no JSON: {reason}", AS_JSON) from error
    if not (isinstance(content, list) and content and all(isinstance(pair, tuple) for pair in content)):
        raise DataError(f"{where} is no object with a prompt", AS_JSON)
    names = [name for name, _ in content]
    if "prompt" not in names:
        raise DataError(f"{where} has no field prompt, but {', '.join(names)}", AS_JSON)
    if others := [name for name in names if name != "prompt"]:
        raise DataError(f"{where} has the field {others[0]}, which says nothing here", f"leave it out; {AS_JSON}")
    if len(names) > 1:
        raise DataError(f"{where} has {len(names)} prompts", "write one in each line")
    if not isinstance(content[0][1], str):
        raise DataError(f"{where}: its prompt is no text", AS_JSON)
    return content[0][1]
