"""The report's section on long contexts: figures by hand, what is not comparable, every output."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lmlab.report import figures, markdown, page, plain, terminal
from lmlab.report.build import build
from lmlab.report.bundle import pack
from lmlab.report.long_lines import RATIO
from lmlab.report.long_panels import look_of, panels
from lmlab.report.palette import HEAT_DARK, HEAT_LIGHT, heat, heat_colours, luminance
from lmlab.report.published import TAG, published
from lmlab.report.sources import opened
from lmlab.runs.intervals import wilson
from tests.report import made
from tests.report.made_long import LENGTHS, alibi, away, cell, evaluated, passkey, rope, summary, two_arms

WHY = "learned positions end at 256"


@pytest.fixture(autouse=True)
def learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(made.PARTS, "pos=learned", {"name": "learned"})


def rows_of(report: Any, name: str) -> list[dict[str, Any]]:
    table = next(t for t in [*report.long_context.tables, report.long_context.short] if t.name == name)
    return [{c.key: cell for c, cell in zip(table.columns, row, strict=True)} for row in table.rows]


def row_of(report: Any, name: str, **wanted: Any) -> dict[str, Any]:
    (found,) = [row for row in rows_of(report, name) if all(row[key].value == v for key, v in wanted.items())]
    return found


def lines_of(report: Any, figure: str) -> dict[str, Any]:
    return {line.name: line for line in report.long_context.lines if line.figure == figure}


# ---------------------------------------------------------------- figures


def test_no_section_without_an_evaluation(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000001")
    report = made.report(tmp_path, str(tmp_path))
    assert report.long_context is None
    assert "Long contexts" not in markdown.render(report) + page.render(report)
    assert json.loads(plain.as_json(report))["long_context"] is None


def test_longer_losses_stand_beside_those_at_the_trained_length(tmp_path: Path) -> None:
    report = two_arms(tmp_path)
    row = row_of(report, "long_text", arm="pos=rope", scaling="none", length=1024)
    # by hand: seeds are 0.1 apart, sd 0.1/√2; both are 1.0 above their own loss at 256
    assert row["loss"].value == pytest.approx(4.45)
    assert row["loss"].text == "4.4500 ± 0.0707 (SE 0.02)"
    assert row["loss_trained"].text == "3.4500"
    assert row["loss_ratio"].value == pytest.approx(math.e)
    assert row["sliding_loss"].value == pytest.approx(4.35)
    assert row["sliding_trained"].value == pytest.approx(3.35)
    assert row["key_loss"].text == "5.0000 ± 0.0000 (SE 0.3; n 40)"
    assert (row["n_documents"].value, row["seeds"].value, row["times"].value) == (8, 2, 4)
    assert row_of(report, "long_text", arm="pos=rope", scaling="pi", length=512)["factor"].value == 2
    for length in (128, 256):
        short = row_of(report, "long_text", arm="pos=rope", scaling="none", length=length)
        assert (short["loss_trained"].text, short["loss_ratio"].text) == ("–", "–")
    assert row_of(report, "long_short", arm="pos=rope", scaling="none", windows="apart")["1024"].text == "85.6 ×2.72"


def test_ratios_are_to_the_checkpoint_as_it_was_trained(tmp_path: Path) -> None:
    """A typed factor makes the loss at the trained length worse, too: that is not what longer ones stand beside."""
    run = made.run(tmp_path, "a-00000001")
    losses = {("none", 256): 3.0, ("none", 512): 3.5, ("pi", 256): 3.4, ("pi", 512): 3.4}
    evaluated(run, [cell(name, n, loss) for (name, n), loss in losses.items()])
    report = made.report(tmp_path, str(tmp_path))
    row = row_of(report, "long_text", scaling="pi", length=512)
    assert row["loss_ratio"].value == pytest.approx(math.exp(0.4))
    assert row["loss_trained"].text == "3.0000"
    line = next(line for name, line in lines_of(report, "ratio").items() if "pi" in name)
    assert line.mean == pytest.approx([math.exp(0.4), math.exp(0.4)])


def test_scores_are_over_seeds_with_n_interval_and_chance(tmp_path: Path) -> None:
    report = two_arms(tmp_path)
    row = row_of(report, "long_scores", arm="pos=rope", scaling="pi", what="needle")
    assert row["trained_score"].value == 0.8
    assert (row["n"].value, row["chance"].value, row["seeds"].value) == (60, 0.1, 2)  # 3 depths × 10 × 2 seeds
    low, high = wilson(48, 60)
    assert f"({low:.2f}…{high:.2f})" in row["trained_score"].text
    assert row["effective_length"].text == "768 ± 362"  # 512 and 1,024
    assert row["k_max"].text == "1,024"
    # each of three depths has SE 0.3
    assert row["gain"].text == f"0.6 ± 0 (SE {0.3 / math.sqrt(3):.3g})"
    task = row_of(report, "long_scores", what="passkey")
    assert (task["n"].value, task["chance"].value) == (40, 1e-5)


def test_wilson_is_the_textbook_interval() -> None:
    assert wilson(8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert wilson(0, 10)[0] == 0
    assert wilson(10, 10)[1] == pytest.approx(1)


def test_a_seed_that_reaches_no_length_is_counted(tmp_path: Path) -> None:
    for seed, effective in ((0, 512), (1, None)):
        run = made.run(tmp_path, f"a-0000000{seed}", seed=seed)
        evaluated(run, [cell("own", 256, 3.0)], rows=[summary("needle", "own", effective)])
    (row,) = rows_of(made.report(tmp_path, str(tmp_path)), "long_scores")
    assert row["effective_length"].text == "512 (1 of 2 seeds)"


def test_what_is_not_available_says_why(tmp_path: Path) -> None:
    run = made.run(tmp_path, "a-00000001", "pos=learned")
    cells = [cell("own", 128, 3.5), cell("own", 256, 3.4), away("own", 512, WHY), away("own", 1024, WHY)]
    evaluated(run, cells, rows=[summary("needle", "own", 256)], left_out=[{"length": 2048, "why": "memory"}])
    report = made.report(tmp_path, str(tmp_path))
    row = row_of(report, "long_text", length=1024)
    assert (row["sliding_loss"].text, row["why"].text, row["seeds"].value) == ("n/a", WHY, 0)
    assert row_of(report, "long_short", windows="apart")["512"].text == "n/a"
    assert rows_of(report, "long_scores")[0]["why"].text == f"512, 1,024: {WHY}"
    notes = report.long_context.notes
    assert f"not available at 512, 1,024 tokens: {WHY} (as trained)" in notes
    assert "not measured at 2048: memory (pos=learned)" in notes
    assert report.long_context.findings == []  # nothing longer was measured
    assert RATIO not in {line.figure for line in report.long_context.lines}


def test_lines_are_means_over_seeds(tmp_path: Path) -> None:
    report = two_arms(tmp_path)
    line = lines_of(report, "perplexity")["pos=rope · none"]
    assert line.x == list(LENGTHS)
    assert (line.n, line.trained) == (2, 256)
    assert (line.low[1], line.mean[1], line.high[1]) == pytest.approx([math.exp(v) for v in (3.4, 3.45, 3.5)])
    needle = lines_of(report, "score/needle")["pos=rope · none"]
    assert needle.mean == pytest.approx([0.8, 0.8, 0.15, 0.15])  # 1 and 2 of 10
    assert (needle.low[-1], needle.high[-1], needle.chance) == (0.1, 0.2, 0.1)
    copy = lines_of(report, "score/copy")["pos=alibi"]
    assert copy.mean == [0.8] * 4
    position = lines_of(report, "position")["pos=alibi"]
    assert (position.length, position.x[:3], position.x[-1]) == (1024, [8, 24, 48], 768)
    assert position.mean[0] == pytest.approx(3.3 + 1 / 16)
    ratio = lines_of(report, RATIO)["pos=rope · none"]
    assert ratio.x == [0.5, 1, 2, 4]
    assert ratio.mean[-1] == pytest.approx(math.e)


def test_maps_count_right_answers_of_all_seeds(tmp_path: Path) -> None:
    maps = {(one.what, one.name): one for one in two_arms(tmp_path).long_context.maps}
    needle = maps["needle", "pos=rope · none"]
    assert (needle.lengths, needle.depths) == (list(LENGTHS), [0, 0.5, 1])
    assert (needle.correct[0], needle.n[0]) == ([16, 16, 3, 3], [20] * 4)
    assert maps["passkey", "pos=rope · none"].correct[1] == [18, 18, 2, 2]
    assert {what for what, _ in maps} == {"needle", "passkey"}


# ---------------------------------------------------------------- which evaluation, what compares


def test_the_newest_evaluation_of_the_last_checkpoint_counts(tmp_path: Path) -> None:
    run = made.run(tmp_path, "a-00000001", result={"content_hash": "1a57"})
    evaluated(run, [cell("own", 256, 9.0)], when="2026-01-01T000000.000000", content_hash="1a57")
    evaluated(run, [cell("own", 256, 3.0)], when="2026-01-02T000000.000000", content_hash="1a57")
    evaluated(run, [cell("own", 256, 7.0)], when="2026-01-03T000000.000000", content_hash="01d", step=50)
    (row,) = rows_of(made.report(tmp_path, str(tmp_path)), "long_text")
    assert row["loss"].value == 3.0


def test_another_checkpoint_and_no_evaluation_are_said(tmp_path: Path) -> None:
    rope(tmp_path, 0)
    made.run(tmp_path, "rope-00000001", seed=1)
    late = made.run(tmp_path, "late-20000001", "norm=layernorm", result={"content_hash": "1a57"})
    evaluated(late, [cell("own", 256, 3.0)], content_hash="01d", step=50)
    made.run(tmp_path, "gqa-30000001", "attn=gqa")
    notes = made.report(tmp_path, str(tmp_path)).long_context.notes
    assert any(note.endswith("is without rope-00000001: no evaluation of its last checkpoint") for note in notes)
    assert any("late-20000001 (evaluated at step 50, which is not the last checkpoint)" in note for note in notes)
    (none,) = [note for note in notes if note.startswith("no evaluation of long contexts in")]
    assert "norm=layernorm attn=mha" in none
    assert "norm=rmsnorm attn=gqa" in none


def test_different_token_sets_do_not_compare(tmp_path: Path) -> None:
    rope(tmp_path, 0)
    alibi(tmp_path, 0, n_documents=4, tokens=1000)
    found = made.report(tmp_path, str(tmp_path)).long_context
    (note,) = [note for note in found.notes if "can't be compared" in note]
    assert "32,768 tokens of 8 documents of sotu val [f1f1f1f1] in pos=rope" in note
    assert "1,000 tokens of 4 documents of sotu val [f1f1f1f1] in pos=alibi" in note
    assert found.unlike
    (few,) = [note for note in found.notes if "standard errors" in note and "only" in note]
    assert few.startswith("only 4 documents in pos=alibi")


def test_arms_that_are_not_causal_are_said(tmp_path: Path) -> None:
    rope(tmp_path, 0)
    run = alibi(tmp_path, 0)
    run.update_manifest(noncausal="moe=expert_choice: a later token may take a place")
    found = made.report(tmp_path, str(tmp_path)).long_context
    assert any(note.startswith("not causal") and note.endswith(": pos=alibi") for note in found.notes)
    assert "not causal" in found.unlike


def test_same_token_sets_are_not_complained_of(tmp_path: Path) -> None:
    found = two_arms(tmp_path).long_context
    assert found.unlike == ""
    assert not [note for note in found.notes if "compare" in note or "only" in note or "test" in note]


def test_a_seed_on_another_token_set_is_left_out(tmp_path: Path) -> None:
    rope(tmp_path, 0)
    rope(tmp_path, 1)
    rope(tmp_path, 2, tokens=999)
    report = made.report(tmp_path, str(tmp_path))
    assert row_of(report, "long_text", scaling="none", length=256)["loss"].value == pytest.approx(3.45)
    assert any("without rope-00000002: measured on another token set" in note for note in report.long_context.notes)


def test_looks_at_test_are_said(tmp_path: Path) -> None:
    rope(tmp_path, 0, split="test", test_evaluations=3)
    notes = made.report(tmp_path, str(tmp_path)).long_context.notes
    assert any(note.startswith("the test split was looked at (3 times in") for note in notes)


def test_a_score_at_chance_has_no_effective_length_to_speak_of(tmp_path: Path) -> None:
    run = made.run(tmp_path, "a-00000001")
    evaluated(run, [cell("own", n, 3.0, right=1) for n in LENGTHS], rows=[summary("needle", "own", 1024, 0.1)])
    (note,) = [n for n in made.report(tmp_path, str(tmp_path)).long_context.notes if "chance" in n]
    assert note == (
        "needle is not above chance at the trained length, so its effective length says nothing: as trained: 3 of 30"
    )


def test_a_longer_figure_without_a_trained_one_is_said(tmp_path: Path) -> None:
    evaluated(made.run(tmp_path, "a-00000001"), [cell("own", 512, 3.0)])
    report = made.report(tmp_path, str(tmp_path))
    assert any("longer figures stand alone" in note for note in report.long_context.notes)
    (row,) = rows_of(report, "long_text")
    assert (row["loss_trained"].text, row["loss_ratio"].text) == ("–", "–")


@pytest.mark.parametrize("content", ["{", "[]", '{"long_context": 3}', '{"long_context": {"trained_length": "x"}}'])
def test_a_damaged_evaluation_is_a_problem_and_stops_nothing(tmp_path: Path, content: str) -> None:
    run = rope(tmp_path, 0)
    (run.path / "eval" / "2027-long-context.json").write_text(content, encoding="utf-8")
    report = made.report(tmp_path, str(tmp_path))
    assert report.long_context is not None
    assert any("eval/2027-long-context.json" in problem for problem in report.arms[0].runs[0].problems)


def test_nothing_is_taken_for_granted_in_a_file(tmp_path: Path) -> None:
    """Lists of anything, figures that are words, cells without a length."""
    cells: list[Any] = [3, {"scaling": "own"}, {"length": 256, "loss": "low", "needle": 5, "copy": [], "buckets": [1]}]
    evaluated(made.run(tmp_path, "a-00000001"), cells, rows=[{"what": "needle"}], tasks=[{"length": 256}])
    report = made.report(tmp_path, str(tmp_path))
    page.render(report)
    markdown.render(report)
    assert not lines_of(report, "perplexity")


# ---------------------------------------------------------------- outputs


def test_every_output_shows_it(tmp_path: Path) -> None:
    report = two_arms(tmp_path)
    text = io.StringIO()
    terminal.show(report, Console(file=text, width=100))
    shown = text.getvalue()
    assert "long contexts: perplexity by length, × that at the trained length" in shown
    (own,) = [row for row in map(str.split, shown.splitlines()) if row[:3] == ["pos=rope", "none", "apart"]]
    assert own[3:] == ["256", "34.8", "31.5", "38.5", "×1.22", "85.6", "×2.72", "8", "2"]
    said = "pos=rope · pi: perplexity at 1,024 tokens, 4 × the trained length, is 1.65 times that at 256"
    assert f"long: {said}" in shown
    document = markdown.render(report)
    assert "## Long contexts: beyond the trained length" in document
    assert "### Effective lengths" in document
    html = page.render(report)
    assert said in html
    assert html.count("<figure") == html.count("<figure data-metric=")  # the page's own switch is of these alone
    assert "needle of pos=rope · none by length and depth: 114 of 240 right" in html
    assert html.count('class="rule"') >= len(list(panels(report.long_context)))
    assert TAG in html
    assert "arXiv 2108.12409, Table 2" in html
    body = json.loads(plain.as_json(report))["long_context"]
    assert {line["name"] for line in body["lines"] if line["figure"] == "perplexity"} == {
        *("pos=rope · none", "pos=rope · pi", "pos=alibi")
    }


def test_figures_are_drawn_as_files(tmp_path: Path) -> None:
    report = two_arms(tmp_path)
    written = [path.name for path in figures.draw(report, tmp_path / "out", ["svg"])]
    long = [name for name in written if name.startswith("long-")]
    assert long == [
        *("long-sliding-perplexity.svg", "long-perplexity.svg", "long-position.svg", "long-score-needle.svg"),
        *("long-score-copy.svg", "long-score-passkey.svg", "long-ratio.svg", "long-depth-needle.svg"),
        "long-depth-passkey.svg",
    ]
    ratio = (tmp_path / "out" / "long-ratio.svg").read_text(encoding="utf-8")
    assert "published, other data and scale" in ratio
    assert "ALiBi, published" in ratio
    assert "length / trained length" in ratio
    assert "16/20" in (tmp_path / "out" / "long-depth-needle.svg").read_text(encoding="utf-8")


def test_no_name_of_a_task_leads_out_of_the_folder(tmp_path: Path) -> None:
    tasks = [passkey("own", n, 9) | {"task": "../../x"} for n in LENGTHS]
    evaluated(made.run(tmp_path / "runs", "a-00000001"), [], tasks=tasks)
    report = made.report(tmp_path, str(tmp_path / "runs"))
    written = figures.draw(report, tmp_path / "a" / "b" / "out", ["svg"])
    assert [path.name for path in written if "long" in path.name] == ["long-score-x.svg", "long-depth-x.svg"]
    assert {path.resolve().parent for path in written} == {tmp_path / "a" / "b" / "out"}


def test_a_bundle_gives_the_same_section(tmp_path: Path) -> None:
    two_arms(tmp_path / "runs")
    bundle = tmp_path / "out.zip"
    with opened([str(tmp_path / "runs")], tmp_path) as selection:
        here = build(selection, made.outside)
        pack(bundle, selection, here)
    there = made.report(tmp_path, str(bundle))
    assert there.long_context == here.long_context
    assert there.long_context is not None


# ---------------------------------------------------------------- published, looks, colours


def test_published_ratios_are_those_of_the_papers() -> None:
    found = {line.scaling: line for line in published(lambda word: None)}
    # Press et al. 2022 over the trained length, at about twice and seven times
    for name, twice, seven in (("sinusoidal", 2.17, 8.9), ("rotary", 1.06, 1.77), ("ALiBi", 0.949, 0.933)):
        assert found[name].mean[1] == pytest.approx(twice, abs=0.006)
        assert found[name].mean[3] == pytest.approx(seven, abs=0.03)
    assert found["T5 bias"].mean[1:] == pytest.approx([0.956, 0.962, 1.166], abs=0.001)
    assert found["T5 bias"].name.endswith("(out of memory at 15512)")
    assert found["PI untuned"].x == [1, 4]
    assert found["PI untuned"].mean[1] == pytest.approx(16.10 / 7.20)
    assert found["YaRN tuned to 8k"].mean[1] == pytest.approx(6.04 / 3.35)
    assert all(line.mean[0] == 1 and "arXiv" in line.source for line in found.values())


def test_a_published_line_has_the_colour_of_what_it_is_set_beside(tmp_path: Path) -> None:
    report = two_arms(tmp_path)
    looks = look_of(report, report.long_context)
    arm = {run.label: i for i, run in enumerate(report.arms)}
    assert looks[None, "ALiBi"].colour == looks[arm["pos=alibi"], "own"].colour
    assert looks[None, "PI untuned"].colour == looks[arm["pos=rope"], "pi"].colour
    assert looks[None, "T5 bias"].colour == -1
    assert all(look.open == (arm_ is None) for (arm_, _), look in looks.items())
    own = [(look.colour, look.dash, look.mark) for (arm_, _), look in looks.items() if arm_ is not None]
    assert len(set(own)) == len(own)


@pytest.mark.parametrize("stops", [HEAT_LIGHT, HEAT_DARK], ids=["light", "dark"])
def test_shares_keep_their_order_in_grey_and_can_be_read(stops: Any) -> None:
    rgb = [[int(ground[i : i + 2], 16) for i in (1, 3, 5)] for ground, _ in heat_colours(stops)]
    grey = [luminance(colour) for colour in rgb]
    assert grey == sorted(grey, reverse=stops is HEAT_LIGHT)
    assert len(set(grey)) == 11
    for light, (_, text) in zip(grey, heat_colours(stops), strict=True):
        other = 1.0 if text == "#ffffff" else 0.0
        assert (max(light, other) + 0.05) / (min(light, other) + 0.05) >= 4.5
    assert [heat(share) for share in (0, 0.5, 1)] == [0, 5, 10]


def test_ticks_and_rules_lie_within_the_panel(tmp_path: Path) -> None:
    for panel in panels(two_arms(tmp_path).long_context):
        for scale in (panel.x, panel.y):
            assert len(scale.ticks) >= 3, panel.name
            assert all(0 <= scale.at(value) <= 1 for value, _ in scale.ticks), panel.name
        assert panel.rules
        assert re.search("trained", panel.rules[0][1])
        values = [v for line in panel.lines for row in (line.low, line.high) for v in row]
        assert all(-1e-9 <= panel.y.at(v) <= 1 for v in values), panel.name
