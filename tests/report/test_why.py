"""The report's section on what probes found: figures by hand, what stands out, and arms without probes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lmlab.report import markdown, page, plain, terminal
from lmlab.report.page_why import frame
from lmlab.runs.probe_names import LAYER, name
from tests.report import made


def rows(bits: float = 2.0, *, at: dict[int, dict[str, list[float | None]]] | None = None, **lines: Any) -> list[Any]:
    """made.curve with probes in the rows of steps 50 and 100: residual_rms=[of layer 0, of layer 1]."""
    found = made.curve(bits)
    for step, figures in (at or {50: {f: [9.0] * len(v) for f, v in lines.items()}, 100: lines}).items():
        for figure, line in figures.items():
            found[step // 10 - 1] |= {name(layer, figure): value for layer, value in enumerate(line)}
    return found


def cells(report: Any, figure: str) -> list[list[Any]]:
    return [[cell.value for cell in row[1:]] for row in report.why.table.rows if row[0].text == figure]


def test_no_section_without_probes(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001")
    report = made.report(tmp_path, str(tmp_path))
    assert report.why is None
    assert "Why" not in markdown.render(report)
    assert "Why: inside" not in page.render(report)
    assert json.loads(plain.as_json(report))["why"] is None


def test_the_last_probe_over_layers_and_seeds(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", seed=0, rows=rows(residual_rms=[1.0, 4.0, 2.0], ffn_dead_frac=[0.0, 0.0, 0.0]))
    made.run(tmp_path, "a-00000002", seed=1, rows=rows(residual_rms=[3.0, 2.0, 5.0], ffn_dead_frac=[0.0, 0.0, 0.0]))
    made.run(tmp_path, "b-00000003", "norm=layernorm", rows=rows(residual_rms=[1.0, 1.0, 1.5]))
    report = made.report(tmp_path, str(tmp_path))
    # by hand: layers over seeds are 2, 3, 3.5
    layernorm, rmsnorm = sorted(cells(report, "residual_rms"))
    assert rmsnorm == ["norm=rmsnorm", pytest.approx(8.5 / 3), 2.0, 0, 3.5, 2]
    assert layernorm == ["norm=layernorm", pytest.approx(3.5 / 3), 1.0, 0, 1.5, 2]
    assert sorted(cells(report, "ffn_dead_frac"), key=str) == [
        ["norm=layernorm", None, None, None, None, None],
        ["norm=rmsnorm", 0.0, 0.0, 0, 0.0, 0],
    ]
    (profile,) = [c for c in report.why.profiles if c.metric == "residual_rms" and c.n == 2]
    assert (profile.mean, profile.low, profile.high) == ([2, 3, 3.5], [1, 2, 2], [3, 4, 5])
    assert report.why.findings == report.why.notes == []


def test_what_stands_out_is_said_with_its_figure(tmp_path: Path) -> None:
    odd = {
        "grad_norm": [0.02, 0.3, 1.0],
        "attn_entropy_frac": [0.9, 0.06, 0.08],
        "ffn_dead_frac": [0.0, 0.1, 0.42],
        "residual_rms": [0.5, 2.0, 8.0],
        "attn_max_logit": [3.0, 120.0, 5.0],
        "act_kurtosis": [3.0, 2.0, 300.0],
        "update_ratio": [1e-3, 1e-3, 0.5],
    }
    calm = {figure: [1.0, 1.0, 1.0] for figure in odd} | {"ffn_dead_frac": [0.0] * 3, "update_ratio": [1e-3] * 3}
    made.run(tmp_path, "a-00000001", rows=rows(**calm))
    made.run(tmp_path, "b-00000002", "norm=layernorm", rows=rows(**odd))
    assert made.report(tmp_path, str(tmp_path)).why.findings == [
        "norm=layernorm: attention entropy is 0.06 of uniform in layer 1 (below 0.1: collapsed), so in 1 more layer",
        "norm=layernorm: attention scores reach 120 in layer 1 (above 100)",
        "norm=layernorm: ffn_dead_frac is 0.42 in layer 2 (above 0.1)",
        "norm=layernorm: act_kurtosis is 300 in layer 2 (above 100: outliers)",
        "norm=layernorm: one step moves the matrices of layer 2 by 0.5 of their norm",
        "norm=layernorm: gradient norm of layer 0 is 0.02 of the last layer's (0.02 against 1)",
        "norm=layernorm: residual RMS goes from 0.5 in layer 0 to 8 in the last layer (16 times)",
    ]


def test_arms_without_probes_and_other_steps_are_said(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", rows=rows(residual_rms=[1.0, 1.0]))
    made.run(tmp_path, "b-00000002", "norm=layernorm", rows=rows(at={50: {"residual_rms": [1.0, 2.0]}}))
    made.run(tmp_path, "c-00000003", "pos=alibi")
    why = made.report(tmp_path, str(tmp_path)).why
    assert len(why.notes) == 2
    assert why.notes[0].startswith("no probes in norm=rmsnorm pos=alibi: train.probe_every_steps was off")
    assert "50 in norm=layernorm pos=rope" in why.notes[1]
    assert "100 in norm=rmsnorm pos=rope" in why.notes[1]


def test_of_a_diverged_run_the_last_row_with_a_number_counts(tmp_path: Path) -> None:
    at: Any = {50: {"residual_rms": [1.0, None]}, 100: {"residual_rms": [None, None]}}
    made.run(tmp_path, "a-00000001", rows=rows(at=at), state="diverged")
    report = made.report(tmp_path, str(tmp_path))
    assert cells(report, "residual_rms") == [[report.arms[0].label, 1.0, 1.0, 0, 1.0, 0]]


def test_every_output_shows_it(tmp_path: Path) -> None:
    every = {figure: [0.05, 0.06] for figure in LAYER} | {"attn_entropy_frac": [0.5, 0.5]}
    ends = {"probe/embed/residual_rms": 0.125, "probe/logits/absmax": 31.0}
    first, second = rows(**every), rows(**every | {"ffn_dead_frac": [0.05, 0.42]})
    first[-1] |= ends
    made.run(tmp_path, "a-00000001", rows=first)
    made.run(tmp_path, "b-00000002", "norm=layernorm", rows=second)
    report = made.report(tmp_path, str(tmp_path))
    line = "norm=layernorm: ffn_dead_frac is 0.42 in layer 1 (above 0.1)"
    text = io.StringIO()
    terminal.show(report, Console(file=text, width=100))
    shown = text.getvalue()
    assert f"why: {line}" in shown
    (own,) = [row for row in shown.splitlines() if row.startswith("logits/absmax")]
    assert own.split() == ["logits/absmax", *(["31", "–"] if report.arms[0].label == "norm=rmsnorm" else ["–", "31"])]
    assert "0.235 | 0.42 (1)" in shown
    assert "* norm=layernorm: ffn\\_dead\\_frac is 0.42 in layer 1" in markdown.render(report)
    html = page.render(report)
    assert f"<li>{line}" in html
    assert html.count('against the layer, 2 lines"') == len(LAYER)
    assert json.loads(plain.as_json(report))["why"]["findings"] == [line]


def test_many_arms_get_a_row_each_instead_of_a_column(tmp_path: Path) -> None:
    for i in range(8):
        made.run(tmp_path, f"a-0000000{i}", f"optim.lr={i + 1}", rows=rows(residual_rms=[1.0, 2.0]))
    report = made.report(tmp_path, str(tmp_path))
    text = io.StringIO()
    terminal.show(report, Console(file=text, width=100))
    assert sum(row.startswith("residual_rms ") for row in text.getvalue().splitlines()) == 8


def test_the_frame_holds_all_that_is_finite(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", rows=rows(residual_rms=[1.0, 1000.0, None, 2.0]))
    (curve,) = made.report(tmp_path, str(tmp_path)).why.profiles
    shown = frame([curve])
    assert shown is not None
    assert (shown.x0, shown.x1) == (0, 3)
    assert shown.y0 < 1 < 1000 < shown.y1
    assert frame([]) is None
