"""`lmlab eval --tasks` without lm_eval: names, flags that act on nothing, task files that are read and never run."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from lmlab.cli.app import make_app
from lmlab.errors import LmlabError
from lmlab.eval.harness_tasks import named, read
from lmlab.runs.find import Found


def refused(*words: str) -> LmlabError:
    error = CliRunner().invoke(make_app(), ["eval", *words]).exception
    assert isinstance(error, LmlabError), error
    return error


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["--tasks", "needle"], "`--tasks` needle: lmlab has no task of that name", "is named lm_eval:needle"),
        (["--tasks", "lm_eval:arc,piqa"], "`--tasks` piqa: lmlab has no task", "lm_eval:piqa"),
        (["--tasks", "lm_eval:"], "`--tasks` lm_eval:: lmlab has no task", "lm_eval:NAME"),
        (["--tasks", ","], "`--tasks` names none", "lm_eval:NAME"),
        (["--tasks", "lm_eval:a,lm_eval:a"], "`--tasks` names lm_eval:a twice", "once"),
        (["--tasks", "lm_eval:a", "--split", "val"], "`--split` does not act on --tasks", "leave --split out"),
        (["--tasks", "lm_eval:a", "--probe"], "`--probe` does not act on --tasks", "leave --probe out"),
        (["--tasks", "lm_eval:a", "--bos", "off"], "`--bos` is off", "always or empty"),
        (["--tasks", "lm_eval:a", "data=sotu"], "`data` can't be changed at evaluation", "set: kernels, device"),
        (["--tasks", "lm_eval:a", "compile=true"], "`compile` can't be changed at evaluation", "set: kernels, device"),
        (["--limit", "3"], "`--limit` acts on tasks, and --tasks is not given", "or give --tasks"),
        (["--batch-size", "3"], "`--batch-size` acts on tasks", "or give --tasks"),
        (["--bos", "always"], "`--bos` acts on tasks", "or give --tasks"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_told(words, message, hint):
    error = refused(*words)
    assert message in error.message
    assert hint in error.hint


def test_lm_eval_that_is_not_installed_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr("lmlab.runs.find.resolve", lambda name, root: Found(None))  # type: ignore[arg-type]
    error = refused("a_run", "--tasks", "lm_eval:arc_easy")
    assert error.message == "`--tasks lm_eval:…` needs lm_eval, which is not installed"
    assert error.hint == "pip install 'lmlab[lm-eval]'"


def test_names_and_files_are_told_apart():
    assert named("lm_eval:arc_easy, lm_eval:my/own.yaml") == ["arc_easy", "my/own.yaml"]


CODE = {
    "function": "process_docs: !function code.run",
    "function in a list": "metric_list: [{metric: !function code.run}]",
    "class": "class: !function code.Run",
    "object": "doc_to_text: !!python/object/apply:os.system ['true']",
    "prompt": "use_prompt: promptsource:all",
}


@pytest.mark.parametrize("line", CODE.values(), ids=CODE.keys())
@pytest.mark.parametrize("included", [False, True], ids=["plain", "included"])
def test_files_that_bring_code_are_refused(tmp_path, line, included):
    (tmp_path / "code.py").write_text("raise SystemExit('it was run')")
    (tmp_path / "task.yaml").write_text(f"task: a\n{line}\n" if not included else "task: a\ninclude: more.yaml\n")
    (tmp_path / "more.yaml").write_text(f"{line}\n")
    with pytest.raises(LmlabError) as caught:
        read(tmp_path / "task.yaml")
    assert "brings code, which is not run" in caught.value.message
    assert ("more.yaml" if included else "task.yaml") in caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: [", "can't be read: while parsing"),
        ("- a", "is no task"),
        ("output_type: generate_until", "it has no key task"),
        ("group: a\ntask: [b]", "is a group of tasks, not a task"),
        ("task: a\ninclude: task.yaml", "includes itself"),
        ("task: a\ninclude: absent.yaml", "absent.yaml can't be read: No such file"),
    ],
)
def test_files_that_are_no_task_are_told(tmp_path, text, message):
    (tmp_path / "task.yaml").write_text(text)
    with pytest.raises(LmlabError) as caught:
        read(tmp_path / "task.yaml")
    assert message in caught.value.message


def test_a_file_and_what_it_includes_are_read(tmp_path):
    (tmp_path / "task.yaml").write_text("task: a\ninclude: [more.yaml]\n")
    (tmp_path / "more.yaml").write_text("output_type: generate_until\n")
    found: list[dict[str, Any]] = read(tmp_path / "task.yaml")
    assert [sorted(content) for content in found] == [["include", "task"], ["output_type"]]
