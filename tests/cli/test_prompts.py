"""A file of prompts: where a line ends, what a line of JSON may hold, what is told of wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmlab.cli.prompts import MAX_PROMPTS, read_prompts
from lmlab.errors import DataError

ODD = ["a\u2028b", "c\x0cd", "e\x85f", "g\x1ch", "\u2029i", "j\x0bk\u2028", "l\rm"]


def written(path: Path, text: str) -> str:
    path.write_bytes(text.encode())
    return str(path)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_lines_end_with_newlines_alone(tmp_path, end, mark):
    assert read_prompts(None, written(tmp_path / "p.txt", mark + end.join(ODD) + end)) == ODD
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in ODD]
    for name in ("p.jsonl", "P.JSONL", "p.Jsonl"):
        assert read_prompts(None, written(tmp_path / name, mark + end.join([*lines, "", ""]))) == ODD


def test_blanks_of_a_prompt_stay(tmp_path):
    assert read_prompts(None, written(tmp_path / "p.txt", "  a \n \n\tb")) == ["  a ", "\tb"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "line 3 is no JSON: Expecting"),
        ("prompt", "line 3 is no JSON: Expecting value"),
        ("[" * 100_000, "line 3 is no JSON: RecursionError"),
        ('"a"', "line 3 is no object with a prompt"),
        ('["prompt", "a"]', "line 3 is no object with a prompt"),
        ("{}", "line 3 is no object with a prompt"),
        ('{"text": "a", "id": 1}', "line 3 has no field prompt, but text, id"),
        ('{"prompt": "a", "max_new": 3}', "line 3 has the field max_new, which says nothing here"),
        ('{"prompt": "a", "prompt": "b"}', "line 3 has 2 prompts"),
        ('{"prompt": 3}', "line 3: its prompt is no text"),
        ('{"prompt": {"a": "b"}}', "line 3: its prompt is no text"),
    ],
)
def test_wrong_lines_are_told_by_their_number(tmp_path, line, message):
    file = written(tmp_path / "p.jsonl", '{"prompt": "fine"}\n\n' + line)
    with pytest.raises(DataError) as told:
        read_prompts(None, file)
    assert f"`--prompts` {file}, {message}" in told.value.message
    assert told.value.hint


def test_how_many(tmp_path):
    for n in (0, MAX_PROMPTS + 1):
        with pytest.raises(DataError, match=f"has {n:,} prompts"):
            read_prompts(None, written(tmp_path / "p.txt", "a\n" * n))
