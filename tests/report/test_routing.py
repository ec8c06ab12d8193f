"""The report's section on routing: figures by hand, pictures, what stands out; labels of arms that see later tokens."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lmlab.report import figures, markdown, page, plain, terminal
from lmlab.report.captions import warning
from lmlab.report.model import BPB, TRAIN_LOSS
from lmlab.report.routing import COLUMNS, OVER_TIME, SHOWN, name_over_time
from lmlab.runs.routing_names import LOAD, name
from tests.report import made

MOE = "moe=topk"
EXPERTS = ({"name": "topk", "n_experts": 4}, {"name": "expert_choice", "n_experts": 4})
WHY = "moe=expert_choice: a later token may take an earlier one's place with an expert"


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(made.CONFIG, "moe", {"name": "none"})
    for part in EXPERTS:
        monkeypatch.setitem(made.PARTS, f"moe={part['name']}", part)


def rows(
    loads: dict[int, list[int]],
    *,
    of_step: dict[int, list[float]] | None = None,
    bits: float = 2.0,
    **val: dict[int, float],
) -> list[Any]:
    """made.curve with the figures of val in its last row: load_max={1: 2.5}, and load_max of each tenth step."""
    found = made.curve(bits)
    found[-1]["val/loss"] = 2 * bits
    for layer, load in loads.items():
        mean = sum(load) / len(load)
        own = {"load_max": max(load) / mean, "unused_frac": sum(not n for n in load) / len(load)}
        found[-1] |= {name(layer, figure, "val"): value for figure, value in own.items()}
        found[-1][name(layer, LOAD, "val")] = load
    for figure, values in val.items():
        found[-1] |= {name(layer, figure, "val"): value for layer, value in values.items()}
    for layer, line in (of_step or {}).items():
        for row, value in zip(found, line, strict=True):
            row |= {name(layer, "load_max"): value, name(layer, "unused_frac"): value / 10}
    return found


def cells(report: Any) -> list[dict[str, Any]]:
    return [{c.key: cell.value for c, cell in zip(COLUMNS, row, strict=True)} for row in report.routing.table.rows]


def test_no_section_without_experts(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001")
    report = made.report(tmp_path, str(tmp_path))
    assert report.routing is None
    assert "Routing" not in markdown.render(report)
    assert "Routing" not in page.render(report)
    assert json.loads(plain.as_json(report))["routing"] is None


def test_a_row_per_arm_and_layer_over_seeds(tmp_path: Path) -> None:
    made.run(
        tmp_path, "a-00000001", MOE, seed=0, rows=rows({1: [4, 2, 2, 0], 3: [2, 2, 2, 2]}, entropy={1: 1.0, 3: 1.2})
    )
    made.run(tmp_path, "a-00000002", MOE, seed=1, rows=rows({1: [1, 6, 1, 0], 3: [2, 2, 2, 2]}, stability={1: 0.5}))
    made.run(tmp_path, "b-00000003")
    report = made.report(tmp_path, str(tmp_path))
    first, second = cells(report)
    assert (first["layer"], second["layer"]) == (1, 3)
    # by hand: the busiest are 4/2 and 6/2
    assert (first["load_max"], first["unused_frac"], first["entropy"]) == (2.5, 0.25, 1.0)
    assert (first["stability"], second["stability"], second["load_max"]) == (0.5, None, 1.0)
    assert report.routing.table.rows[0][2].text == "2.5 ± 0.707"
    one, other = report.routing.loads
    assert (one.layer, one.n, one.over_mean) == (1, 2, [2.5, 0.75, 0.75, 0.0])  # each seed's in order, then the mean
    assert other.over_mean == [1, 1, 1, 1]
    assert report.routing.findings == ["moe=topk: 25.0% of the experts of layer 1 are chosen by no token of val"]
    assert report.routing.notes == []


def test_a_run_that_holds_loads_has_no_problem(tmp_path: Path) -> None:
    """A list is no column, and nothing that is wrong with the file; what only looks like a load is."""
    made.run(tmp_path, "a-00000001", MOE, rows=rows({0: [1, 2]}))
    run = made.report(tmp_path, str(tmp_path)).arms[0].runs[0]
    assert run.problems == []
    assert run.lists == {"val/moe/0/load": [1, 2]}
    assert not [key for key in run.result if "moe" in key]
    bad = rows({0: [1, 2]})
    bad[-1]["val/moe/0/load"] = [1, "two"]
    made.run(tmp_path / "bad", "b-00000002", MOE, rows=bad)
    run = made.report(tmp_path / "bad", str(tmp_path / "bad")).arms[0].runs[0]
    assert run.lists == {}
    assert "no finite number: 10 (val/moe/0/load)" in run.problems[0]


def test_choices_without_room_stand_out(tmp_path: Path) -> None:
    dropped = {0: 0.08, 1: 0.3, 2: 0.2}
    made.run(tmp_path, "a-00000001", MOE, rows=rows({i: [1, 1] for i in range(3)}, dropped_frac=dropped))
    report = made.report(tmp_path, str(tmp_path))
    assert report.routing.findings == ["30.0% of the choices of layer 1 find no room, some in 1 more layer"]


def test_arms_without_figures_and_other_steps_are_said(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", MOE, rows=rows({0: [1, 1]}, stability={0: 0.9}))
    made.run(tmp_path, "b-00000002", MOE, "norm=layernorm")
    early = made.curve(2.0)
    early[4] |= {"val/moe/0/load_max": 1.5}
    made.run(tmp_path, "c-00000003", MOE, "pos=alibi", rows=early)
    notes = made.report(tmp_path, str(tmp_path)).routing.notes
    assert notes[0].startswith("no figures of routing in norm=layernorm pos=rope: nothing was evaluated")
    assert notes[1].startswith("no stability in norm=rmsnorm pos=alibi: no earlier checkpoint")
    assert "routing is of different steps" in notes[2]
    assert "50 in norm=rmsnorm pos=alibi" in notes[2]


def test_curves_over_steps_are_of_the_worst_layer_and_of_the_mean(tmp_path: Path) -> None:
    lines = {0: [float(i) for i in range(10)], 1: [9.0 - i for i in range(10)]}
    made.run(tmp_path, "a-00000001", MOE, rows=rows({0: [1, 1], 1: [1, 1]}, of_step=lines))
    curves = {curve.metric: curve for curve in made.report(tmp_path, str(tmp_path)).routing.curves}
    assert set(curves) == {name_over_time(figure) for figure in OVER_TIME}
    load, unused = curves["moe/load_max"], curves["moe/unused_frac"]
    assert load.x == [10.0 * i for i in range(1, 11)]
    assert load.mean == [9, 8, 7, 6, 5, 5, 6, 7, 8, 9]
    assert unused.mean == pytest.approx([0.45] * 10)


def test_every_output_shows_it(tmp_path: Path) -> None:
    line = [2.0 + i / 10 for i in range(10)]
    every = {figure: {0: 0.5} for figure in SHOWN if figure not in ("load_max", "unused_frac")}
    made.run(tmp_path, "a-00000001", MOE, rows=rows({0: [6, 2, 0, 0]}, of_step={0: line}, **every))
    made.run(tmp_path, "b-00000002", rows=made.curve(2.0))
    report = made.report(tmp_path, str(tmp_path))
    said = "moe=topk: 50.0% of the experts of layer 0 are chosen by no token of val"
    text = io.StringIO()
    terminal.show(report, Console(file=text, width=100))
    shown = text.getvalue()
    assert "routing: where tokens went, at the last evaluation of val" in shown
    assert f"routing: {said}" in shown
    assert "load: █▃·· layer 0 of moe=topk" in shown
    (own,) = [row for row in map(str.split, shown.splitlines()) if row[:2] == ["moe=topk", "0"]]
    assert own[2:] == ["3", *["0.5"] * 6]
    document = markdown.render(report)
    assert "## Routing: where tokens went" in document
    assert "* `█▃··` layer 0 of moe=topk" in document
    html = page.render(report)
    assert f"<li>{said}" in html
    assert 'aria-label="load_max against steps, 1 line"' in html
    assert "layer 0: 4 experts, the busiest 3.00 times the mean, 2 never used" in html
    assert html.count("<figure") == html.count("<figure data-metric=")  # the page's own switch is of these alone
    body = json.loads(plain.as_json(report))["routing"]
    assert body["loads"] == [
        {"arm": report.arms.index(_arm(report, "topk")), "layer": 0, "over_mean": [3, 1, 0, 0], "n": 1}
    ]
    written = [path.name for path in figures.draw(report, tmp_path / "out", ["svg"])]
    assert written[-2:] == ["routing-load_max.svg", "routing-unused_frac.svg"]
    drawn = (tmp_path / "out" / "routing-load_max.svg").read_text(encoding="utf-8")
    assert "Choices of the busiest expert over the mean" in drawn
    assert "step" in drawn


def _arm(report: Any, moe: str) -> Any:
    return next(arm for arm in report.arms if arm.config["moe"] == moe)


# ---------------------------------------------------------------- parameters and labels


def test_active_parameters_stand_beside_all_of_them(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", MOE, parameters=4000, active_parameters=1500, rows=rows({0: [1, 1]}))
    made.run(tmp_path, "b-00000002", parameters=1000, active_parameters=1000)
    report = made.report(tmp_path, str(tmp_path))
    at = [column.key for column in report.tables[0].columns].index("parameters")
    shown = {arm.config["moe"]: row[at] for arm, row in zip(report.arms, report.tables[0].rows, strict=True)}
    assert (shown["topk"].text, shown["topk"].value) == ("4,000 (1,500 active)", 4000)
    assert shown["none"].text == "1,000"
    table = list(csv.DictReader(io.StringIO(plain.arms_csv(report))))
    assert {row["moe"]: row["active_parameters"] for row in table} == {"topk": "1500", "none": "1000"}


def test_what_is_not_causal_is_labelled_wherever_its_loss_stands(tmp_path: Path) -> None:
    other = rows({0: [1, 1]}, bits=1.5)
    made.run(tmp_path, "a-00000001")
    made.run(tmp_path, "b-00000002", "moe=expert_choice", bits=1.5, rows=other, noncausal=WHY)
    report = made.report(tmp_path, str(tmp_path), baseline="moe=none")
    arms = report.tables[0]
    for key in ("val_bits_per_byte", "delta"):
        at = [column.key for column in arms.columns].index(key)
        by_moe = {arm.config["moe"]: row[at] for arm, row in zip(report.arms, arms.rows, strict=True)}
        assert by_moe["expert_choice"].text.endswith(" (not causal)"), key
        assert by_moe["expert_choice"].mark == "warn"
        assert "causal" not in by_moe["none"].text
    (run,) = [row for row in report.tables[1].rows if row[0].text == "b-00000002"]
    assert run[4].text == "1.5000 (not causal)"
    assert run[4].value == 1.5
    said = "moe=expert_choice is not causal: its losses are of tokens that see later ones, and no causal arm's compare"
    assert f"{said} ({WHY})" in report.notes
    for metric in (BPB, TRAIN_LOSS):
        curves = [curve for curve in report.curves if curve.metric == metric and curve.x_name == "tokens"]
        assert warning(report, curves) == "moe=expert_choice is not causal: tokens see later ones"
        assert warning(report, [c for c in curves if not report.arms[c.arm].facts["noncausal"]]) == ""
    html = page.render(report)
    assert html.count("moe=expert_choice is not causal: tokens see later ones") == 6  # each figure's caption
    assert re.search(r"<li data-arm=\d>.*moe=expert_choice</span><small class=faint>not causal", html)
    figures.draw(report, tmp_path / "out", ["svg"])
    assert "moe=expert_choice (not causal)" in (tmp_path / "out" / "loss-tokens.svg").read_text(encoding="utf-8")
    table = {row["moe"]: row["noncausal"] for row in csv.DictReader(io.StringIO(plain.arms_csv(report)))}
    assert table == {"expert_choice": WHY, "none": ""}


def test_a_run_without_a_figure_has_nothing_to_label(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001", "moe=expert_choice", bits=None, state="failed", noncausal=WHY)
    report = made.report(tmp_path, str(tmp_path))
    assert "(not causal)" not in page.render(report)
