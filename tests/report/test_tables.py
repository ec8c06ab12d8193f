"""Cells and what the text outputs make of them."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lmlab.report import markdown, plain, terminal
from lmlab.report.model import Delta, Report, Table
from lmlab.report.tables import delta_text, duration, memory, signed
from tests.report import made


@pytest.fixture
def report(tmp_path: Path) -> Report:
    """Baseline with two seeds; one arm with a diverged seed and a damaged line; one planned; one unreadable run."""
    root = tmp_path / "runs"
    made.run(root, "a-00000001", seed=0, bits=2.0, result={"best/val/bits_per_byte": 1.9, "tokens_per_s": 5100.0})
    made.run(root, "a-00000002", seed=1, bits=2.2, result={"test/bits_per_byte": 2.5})
    made.run(root, "b-00000003", "norm=layernorm", seed=0, bits=1.9)
    bad = made.run(root, "b-00000004", "norm=layernorm", seed=1, state="diverged", bits=None, error="error: nan")
    bad.metrics_path.write_text("nonsense\n" + '{"step": 40}\n')
    made.run(root, "c-00000005")
    (root / "c-00000005" / "config.yaml").write_text("- nothing\n")
    arms = {"rms": [], "ln": ["norm=layernorm"], "gqa": ["attn=gqa"]}
    members = [("a-00000001", "rms", 0), ("a-00000002", "rms", 1), ("b-00000003", "ln", 0), ("b-00000004", "ln", 1)]
    made.sweep(root, "s-aaaa0001", arms, [*members, ("d-00000006", "gqa", 0), ("c-00000005", "rms", 2)])
    return made.report(root)


def table(report: Report, name: str) -> list[dict[str, str]]:
    (found,) = [t for t in report.tables if t.name == name]
    return [{c.key: cell.text for c, cell in zip(found.columns, row, strict=True)} for row in found.rows]


def test_arms_table(report: Report) -> None:
    base, ln, gqa = table(report, "arms")
    names = ["norm", "attn", "val_bits_per_byte", "delta", "best_val_bits_per_byte", "state", "seeds", "parameters"]
    assert list(base)[:8] == names
    assert base["val_bits_per_byte"] == "2.1000 ± 0.1414"
    assert base["delta"] == "baseline"
    assert base["tokens_per_s"] == "5,050 ± 71"
    assert base["best_val_bits_per_byte"] == "1.9000"
    assert base["test_bits_per_byte"] == "2.5000"
    assert (base["tokens"], base["peak_memory_bytes"]) == ("409,600", "1 MiB")
    assert (base["state"], base["seeds"]) == ("2/2", "0, 1")
    assert (ln["norm"], ln["delta"], ln["state"], ln["seeds"]) == ("layernorm", "−0.1000", "1/2 · 1 diverged", "0")
    assert (gqa["state"], gqa["val_bits_per_byte"], gqa["delta"]) == ("0/1 · 1 planned", "–", "–")
    assert (gqa["parameters"], gqa["seeds"]) == ("–", "–")


def test_runs_table(report: Report) -> None:
    by_name = {row["run"]: row for row in table(report, "runs")}
    assert len(by_name) == 6
    diverged = by_name["b-00000004"]
    assert diverged["state"] == "diverged 40/100"
    assert diverged["problem"] == "nan; metrics.jsonl has 1 damaged line: 1"
    assert (diverged["val_bits_per_byte"], diverged["seed"]) == ("–", "1")
    assert by_name["a-00000001"]["best_val_bits_per_byte"] == "1.9000"
    assert by_name["a-00000001"]["arm"] == "norm=rmsnorm attn=mha"
    assert by_name["c-00000005"]["arm"] == "–"
    assert by_name["c-00000005"]["problem"] == "config.yaml holds no mapping"
    assert by_name["d-00000006"]["state"] == "planned"


def test_notes_name_what_was_left_out_or_passed_over(report: Report) -> None:
    text = "\n".join(report.notes)
    assert "one finished seed, so no spread is known: norm=layernorm attn=mha" in text
    assert "c-00000005 is left out:" in text
    assert "b-00000004: metrics.jsonl has 1 damaged line: 1; passed over" in text


TEXTS = {
    "better": (Delta(-0.0123, 0.003, 2, True), "−0.0123 ± 0.0030"),
    "worse": (Delta(0.5), "+0.5000"),
    "nothing": (Delta(-0.00001), "0.0000"),
    "unfinished": (Delta(None, why="no finished run"), "–"),
    "other text": (Delta(None, why="other validation text"), "– (other validation text)"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_delta_text(case: str) -> None:
    delta, expected = TEXTS[case]
    assert delta_text(delta) == expected


def test_a_delta_over_fewer_seeds_than_the_arm_has_says_so(tmp_path: Path) -> None:
    """Of seeds 0, 1, 2 the baseline has 0 and 1: differences −0.1 and −0.3."""
    for seed, bits in {0: 2.0, 1: 2.2}.items():
        made.run(tmp_path, f"a-0000000{seed}", seed=seed, bits=bits)
    for seed, bits in {0: 1.9, 1: 1.9, 2: 9.0}.items():
        made.run(tmp_path, f"b-0000001{seed}", "norm=layernorm", seed=seed, bits=bits)
    _, ln = table(made.report(tmp_path), "arms")
    assert ln["delta"] == "−0.2000 ± 0.1414 (2 of 3 seeds)"


def test_small_words() -> None:
    assert signed(-2.0) == "−2.0000"
    assert memory(1.75 * 2**30) == "1.8 GiB"
    assert memory(700 * 2**20) == "700 MiB"
    assert [duration(s) for s in (45, 130, 11100)] == ["45 s", "2 min 10 s", "3 h 05 min"]


def test_a_single_arm_has_no_delta_column(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", "optim.lr=0.01")
    (row,) = table(made.report(tmp_path), "arms")
    assert row["arm"] == "optim.lr=0.01"
    assert "delta" not in row


def test_seeds_that_differ_from_each_other_are_told_apart(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", "seed.data=5", seed=3)
    (row,) = table(made.report(tmp_path), "runs")
    assert row["seed"] == "3/5/3"


# ---------------------------------------------------------------- terminal


def shown(report: Report, width: int, *, is_terminal: bool) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None, highlight=False)
    terminal.show(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_off_a_terminal_columns_are_aligned_and_nothing_is_cut(report: Report) -> None:
    lines = shown(report, 40, is_terminal=False).splitlines()
    head = next(line for line in lines if line.startswith("norm"))
    row = next(line for line in lines if line.startswith("layernorm"))
    assert row[head.index("state") :].startswith("1/2 · 1 diverged")
    assert "peak memory" in head
    assert any(line.startswith("note: b-00000004: metrics.jsonl has 1 damaged line: 1") for line in lines)
    assert not any(line.startswith("a-00000001 ") for line in lines)  # it went well: not among the runs shown


@pytest.mark.parametrize("width", [200, 120, 90, 60, 40])
def test_a_narrow_terminal_shows_the_figures_whole(report: Report, width: int) -> None:
    text = shown(report, width, is_terminal=True)
    assert max(map(len, text.splitlines())) <= width
    assert "2.1000 ± 0.1414" in text
    assert "1/2 · 1 diverged" in text
    assert ("not shown, for want of width" in text) == (width in (120, 90, 60))


def test_in_blocks_what_goes_on_stands_further_in(report: Report) -> None:
    lines = shown(report, 30, is_terminal=True).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("  arm: norm=layernorm"))
    assert lines[at + 1].rstrip() == "    attn=mha"
    assert lines[at + 2].startswith("  seed: ")


@pytest.mark.parametrize("width", [30, 160])
def test_no_color_leaves_bold_and_dim_but_no_colour(
    report: Report, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def codes() -> set[str]:
        console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="standard")
        terminal.show(report, console)
        return {code for found in re.findall(r"\x1b\[([0-9;]*)m", console.file.getvalue()) for code in found.split(";")}  # type: ignore[attr-defined]

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert {"31", "33"} <= codes()  # red, yellow
    monkeypatch.setenv("NO_COLOR", "1")
    assert codes() <= {"0", "1", "2"}


def test_only_the_mark_of_a_confound_is_coloured(report: Report) -> None:
    report.confounds = ["data: a in b"]
    console = Console(file=io.StringIO(), width=160, force_terminal=True, color_system="standard", highlight=False)
    terminal.show(report, console)
    assert "\x1b[33mconfound: \x1b[0mdata: a in b\n" in console.file.getvalue()  # type: ignore[attr-defined]


# ---------------------------------------------------------------- Markdown, CSV, JSON


def test_markdown_has_both_tables(report: Report) -> None:
    text = markdown.render(report)
    assert text.startswith("# s-aaaa0001\n")
    assert "| norm | attn | val bits/byte | Δ baseline |" in text
    assert "| layernorm | mha | 1.9000 | −0.1000 |" in text
    assert "| b-00000004 | norm=layernorm attn=mha | 1 | **diverged 40/100** |" in text


def test_markdown_escapes_what_came_from_a_run(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", state="failed", error="error: a|b *c* <d>\nmore")
    text = markdown.render(made.report(tmp_path))
    assert r"a\|b \*c\* \<d\>" in text


def test_csv_has_numbers_and_their_spread(report: Report) -> None:
    base, ln, gqa = csv.DictReader(io.StringIO(plain.arms_csv(report)))
    assert base["arm"] == "norm=rmsnorm attn=mha"
    assert float(base["val_bits_per_byte"]) == pytest.approx(2.1)
    assert float(base["val_bits_per_byte_sd"]) == pytest.approx(0.02**0.5)
    assert (base["val_bits_per_byte_n"], base["baseline"]) == ("2", "True")
    assert float(ln["delta"]) == pytest.approx(-0.1)
    assert (ln["delta_sd"], ln["delta_n"], ln["delta_paired"]) == ("", "1", "True")
    assert (gqa["val_bits_per_byte"], gqa["val_bits_per_byte_n"]) == ("", "0")
    assert (ln["state"], ln["n_finished"], ln["n_runs"]) == ("1/2 · 1 diverged", "1", "2")
    assert (gqa["state"], gqa["n_finished"], gqa["delta_n"]) == ("0/1 · 1 planned", "0", "0")
    assert (base["delta_why"], ln["delta_why"], gqa["delta_why"]) == ("", "", "no finished run")
    runs = list(csv.DictReader(io.StringIO(plain.runs_csv(report))))
    assert [run["elapsed_s"] for run in runs if run["run"] == "a-00000001"] == ["10.0"]


def test_csv_runs_no_formula(report: Report) -> None:
    (found,) = [t for t in report.tables if t.name == "runs"]
    column = [c.key for c in found.columns].index("problem")
    rows = [[cell if i != column else type(cell)("x", "=1+1") for i, cell in enumerate(row)] for row in found.rows]
    report.tables = [Table("runs", found.columns, rows)]
    assert {row["problem"] for row in csv.DictReader(io.StringIO(plain.runs_csv(report)))} == {"'=1+1"}


def test_json_carries_everything(report: Report) -> None:
    found: dict[str, Any] = json.loads(plain.as_json(report))
    assert found["axes"] == ["norm", "attn"]
    base, ln, _ = found["arms"]
    assert base["stats"]["val/bits_per_byte"]["n"] == 2
    assert ln["delta"] == {"mean": pytest.approx(-0.1), "sd": None, "n": 1, "paired": True, "why": ""}
    assert ln["states"] == {"finished": 1, "diverged": 1}
    assert {run["run"] for run in found["runs"]} >= {"a-00000001", "d-00000006"}
    assert {curve["metric"] for curve in found["curves"]} == {"train/loss", "val/bits_per_byte"}
