"""The page as text: it is whole without a browser, loads nothing, and whatever a run is called does no harm."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from html import escape, unescape
from html.parser import HTMLParser

import numpy as np
import pytest

from lmlab.report.captions import UNLIKE
from lmlab.report.curve_svg import axis_ticks, draw, frame, nice_ticks, thinned
from lmlab.report.model import BPB, TRAIN_LOSS, Cell, Column, Curve, Delta, Report, Table
from lmlab.report.page import render
from lmlab.report.palette import DARK, LIGHT, strokes
from lmlab.report.tables import make_tables
from tests.report.synthetic import LABELS, NASTY, report


class Seen(HTMLParser):
    """Tags with their attributes, and the text inside tables' cells and outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.text = ""
        self._inside: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style", "td", "th"):
            self._inside.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if not self._inside or self._inside[-1] in ("td", "th"):
            self.text += data
        if self._inside and self._inside[-1] in ("td", "th"):
            self.cells[-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def made() -> Report:
    return report()


@pytest.fixture(scope="module")
def page(made: Report) -> str:
    return render(made)


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    assert set(re.findall(r"https?://[^\s\"'<]*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|\bsrc=|<link|<iframe|<img|fetch\(|XMLHttpRequest|import\(", page)


def test_content_security_policy_forbids_all_but_inline(page: str) -> None:
    (policy,) = [m["content"] for m in Seen(page).all("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    allowed = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    assert policy.startswith(allowed)
    assert page.index("Content-Security-Policy") < page.index("<style>") < page.index("<script")


def test_every_cell_is_in_the_page_without_javascript(made: Report, page: str) -> None:
    shown = [cell.strip() for cell in Seen(page).cells]
    wanted = [c.title for t in made.tables for c in t.columns] + [
        c.text for t in made.tables for r in t.rows for c in r
    ]
    assert sorted(shown) == sorted(wanted)


def test_every_curve_is_drawn_without_javascript(made: Report, page: str) -> None:
    figures = Seen(page).all("figure")
    assert [(f["data-metric"], f["data-x"]) for f in figures] == [
        (metric, axis) for metric in (BPB, "train/loss") for axis in ("tokens", "flops", "elapsed_s")
    ]
    assert not any("hidden" in f for f in figures)
    assert len([g for g in Seen(page).all("g") if g.get("class", "").startswith("arm ")]) == len(made.curves) == 24


def test_words_of_the_report_are_there(made: Report, page: str) -> None:
    text = Seen(page).text
    for line in (made.title, made.source, made.made, *made.axes, *made.confounds, *made.notes, LABELS[0]):
        assert line in text, line


def test_without_confounds_notes_or_curves_the_sections_are_left_out() -> None:
    bare = report(2)
    bare.confounds, bare.notes, bare.curves, bare.common = [], [], [], {}
    page = render(bare)
    assert "Confounds" not in page
    assert "<h2 id=notes>" not in page
    assert "<figure" not in page
    assert "No run has a point to draw." in page


def test_missing_and_diverged_are_shown_and_coloured(page: str) -> None:
    assert '<td class="n missing">–</td>' in page
    assert '<td class="bad" data-v=0.0 data-is="diverged">diverged</td>' in page
    assert '<td class="warn" data-v=0.5 data-is="finished planned">finished · planned</td>' in page
    assert '<td class="bad" data-is="diverged">diverged</td>' in page  # of a run


def test_an_empty_cell_shows_that_it_is_missing() -> None:
    one = report(1)
    one.tables = [Table("arms", (Column("a", "a", True),), [[Cell("")]])]
    assert "<span>–</span>" in render(one)


DELTAS = {
    "below its spread": (Delta(-0.1, 0.2, 3), ""),
    "equal to its spread": (Delta(0.2, 0.2, 3), ""),
    "better": (Delta(-0.21, 0.2, 2), " lower"),
    "worse": (Delta(0.21, 0.2, 2), " higher"),
    "one seed": (Delta(-1.0, None, 1), ""),
    "nothing": (Delta(0.0, 0.0, 2), ""),
    "rounds to nothing": (Delta(-0.00004, 0.0, 2), ""),
}


@pytest.mark.parametrize("case", DELTAS)
def test_a_difference_is_coloured_only_where_it_is_larger_than_its_spread(case: str) -> None:
    delta, kind = DELTAS[case]
    two = report(2)
    two.arms[1].delta = delta
    page = render(replace(two, tables=make_tables(two.axes, two.arms, [])))
    assert f'<td class="n{kind}" data-v={delta.mean!r}>' in page
    assert len(re.findall('<td class="n (?:lower|higher)', page)) == bool(kind)


def test_a_remark_on_a_number_may_stand_below_it() -> None:
    two = report(2)
    two.arms[1].delta = Delta(None, why="other <text>")
    page = render(replace(two, tables=make_tables(two.axes, two.arms, [])))
    assert "<span>–</span> <small>(other &lt;text&gt;)</small></td>" in page


def test_a_nasty_name_is_harmless_everywhere() -> None:
    made = report()
    made.title = made.source = made.made = NASTY
    made.axes, made.notes, made.common = [NASTY], [NASTY], {NASTY: NASTY}
    made.tables[1] = Table(NASTY, (Column(NASTY, NASTY, help=NASTY),), [[Cell(NASTY, NASTY)]])
    made.curves.append(Curve(0, NASTY, NASTY, [1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [1.0, 2.0], 1))
    made.arms[0].values = {NASTY: NASTY}
    page = render(made)
    assert "alert(" in page
    assert '<script>alert("' not in page
    assert Seen(page).all("script") == [{"type": "application/json", "id": "data"}, {}]
    assert json.loads(_data(page))["arms"][0] == {NASTY: NASTY}
    assert page.count("</script>") == 2


def test_data_for_the_pointer_are_the_curves_and_shared_columns_are_stored_once(made: Report, page: str) -> None:
    data = json.loads(_data(page))
    line, curve = data["figures"][0]["lines"][1], made.curves[1]
    assert line["arm"] == curve.arm == 1
    assert data["pool"][line["x"]] == pytest.approx(curve.x, rel=1e-6)
    assert data["pool"][line["y"]] == pytest.approx(curve.mean, rel=1e-4)
    assert data["pool"][line["low"]] == pytest.approx(curve.low, rel=1e-4)
    assert data["figures"][0]["lines"][0]["x"] == line["x"]
    assert data["figures"][1]["lines"][1]["y"] == line["y"]
    assert data["figures"][1]["lines"][1]["x"] != line["x"]


def test_points_that_are_not_finite_break_the_line_and_are_null_in_the_data() -> None:
    one = report(1)
    mean = [3.0, math.nan, 2.0, math.inf, 1.0, 1.0]
    one.curves = [Curve(0, BPB, "tokens", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], mean, mean, mean, 1)]
    page = render(one)
    (path,) = re.findall(r'class="line" d="([^"]*)" stroke-width="2.4"', page)
    assert path.count("M") == 3
    assert "nan" not in path
    assert [3, None, 2, None, 1, 1] in json.loads(_data(page))["pool"]


def test_a_diverged_arm_does_not_press_the_others_into_a_line() -> None:
    flat = [_flat(i, 2.0 + 0.1 * i) for i in range(3)]
    for shown in (frame([*flat, _flat(3, 50.0)]), frame([*flat, _flat(3, 3.0)], {3})):
        assert shown is not None
        assert (shown.x0, shown.x1, shown.cut) == (0.0, 10.0, (3,))
        assert shown.y0 < 2.0 < 2.2 < shown.y1 < 2.3


def test_a_bad_arm_that_did_not_diverge_is_in_the_frame() -> None:
    shown = frame([*(_flat(i, 2.0) for i in range(5)), _flat(5, 3.5)])
    assert shown is not None
    assert (shown.cut, shown.y1 > 3.5) == ((), True)


def test_bands_are_in_the_frame_and_few_points_are_all_shown() -> None:
    shown = frame([Curve(0, BPB, "tokens", [1.0, 50.0, 100.0], [9.0, 3.0, 2.0], [8.0, 2.0, 1.0], [9.5, 4.0, 3.0], 2)])
    assert shown is not None
    assert shown.y0 < 1.0 < 9.5 < shown.y1


def test_of_many_points_the_first_steep_part_is_not_in_the_frame() -> None:
    x, mean = [float(i) for i in range(100)], [2.0 + 8.0 * 0.5**i for i in range(100)]
    shown = frame([Curve(0, BPB, "tokens", x, mean, mean, mean, 1)])
    assert shown is not None
    assert shown.y1 < 2.1


def test_frame_of_one_point_and_of_none() -> None:
    shown = frame([Curve(0, BPB, "tokens", [5.0], [2.0], [2.0], [2.0], 1)])
    assert shown is not None
    assert (shown.x0, shown.x1) == (0.0, 5.0)
    assert shown.y0 < 2.0 < shown.y1
    assert frame([Curve(0, BPB, "tokens", [5.0], [math.nan], [2.0], [2.0], 1)]) is None
    assert frame([]) is None


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 10.0, [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]),
        (1.63, 2.47, [1.8, 2.0, 2.2, 2.4]),
        (0.0, 8.2e6, [0.0, 2e6, 4e6, 6e6, 8e6]),
        (-1.0, 1.0, [-1.0, -0.5, 0.0, 0.5, 1.0]),
        (3.0, 3.0, [3.0]),
        (0.0, math.inf, [0.0]),
    ],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("axis", "high", "texts", "unit"),
    [
        ("tokens", 8.2e6, ["0", "2M", "4M", "6M", "8M"], ""),
        ("tokens", 500e3, ["0", "100k", "200k", "300k", "400k", "500k"], ""),
        ("tokens", 2.5e9, ["0", "0.5B", "1.0B", "1.5B", "2.0B", "2.5B"], ""),
        ("flops", 8e13, ["0", "2", "4", "6", "8"], "×10¹³"),
        ("elapsed_s", 4000.0, ["0", "1\u202f000", "2\u202f000", "3\u202f000", "4\u202f000"], ""),
    ],
)
def test_ticks_are_short(axis: str, high: float, texts: list[str], unit: str) -> None:
    ticks = axis_ticks(axis, 0.0, high)
    assert (ticks.texts, ticks.unit) == (texts, unit)


def test_thinned_keeps_the_ends_and_says_nothing_new() -> None:
    values = [float(i) for i in range(1000)]
    thin = thinned(Curve(0, BPB, "tokens", values, values, values, values, 2), 100)
    assert len(thin.x) == 100
    assert (thin.x[0], thin.x[-1]) == (0.0, 999.0)
    assert set(thin.x) <= set(values)
    assert thin.x == thin.mean == thin.low == thin.high


def test_line_runs_where_the_points_are() -> None:
    curve = Curve(0, BPB, "tokens", [0.0, 50.0, 100.0], [2.0, 1.0, 1.5], [1.9, 1.0, 1.5], [2.1, 1.0, 1.5], 2)
    shown = frame([curve])
    assert shown is not None
    drawn = draw([curve], strokes(1, 0), shown, label="a < b")
    (line,) = re.findall(r'class="line" d="M([^"]*)"', drawn)
    ys = [int(word.split()[1]) for word in re.findall(r"\d+ -?\d+", line)]
    assert [int(w.split()[0]) for w in re.findall(r"\d+ -?\d+", line)] == [0, 2000, 4000]
    assert ys[1] > ys[2] > ys[0]
    assert 'aria-label="a &lt; b"' in drawn
    assert drawn.count('class="band"') == 1


def test_arms_look_different_and_only_the_baseline_has_the_colour_of_text() -> None:
    looks = strokes(31, 4)
    assert [i for i, look in enumerate(looks) if look.colour == 0] == [4]
    assert len({(look.colour, look.dash) for look in looks}) == 31
    assert [look.dash for look in looks[:7]] == [()] * 7
    assert {look.colour for look in looks[:7]} == set(range(len(LIGHT)))
    assert all(look.colour for look in strokes(5, None))


# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
BLINDNESS = {
    "none": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("kind", BLINDNESS)
def test_colours_stay_apart_under_colour_blindness(colours: tuple[str, ...], kind: str) -> None:
    seen = [_cielab(np.clip(np.array(BLINDNESS[kind]) @ _linear(colour), 0, 1)) for colour in colours]
    nearest = min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2))
    assert nearest > 15  # of CIELAB; 2.3 can just be told apart side by side


def test_the_tables_of_a_real_report_can_be_rendered(made: Report) -> None:
    tables = make_tables(made.axes, made.arms, [])
    page = render(replace(made, tables=tables))
    assert sorted(cell.strip() for cell in Seen(page).cells) == sorted(
        [c.title for t in tables for c in t.columns] + [c.text for t in tables for row in t.rows for c in row]
    )
    assert len(re.findall('<td class="n lower" data-v=|<td class="n higher" data-v=', page)) == 2
    assert '<td class="n" data-v=0.0>baseline</td>' in page  # sorts as no difference
    assert re.search(r'<td class="bad"[^>]*>[^<]*diverged</td>', page)


def test_legend_says_which_arm_is_the_baseline_and_which_did_not_finish(page: str) -> None:
    items = re.findall("<li data-arm=.*?</li>", page)
    words = [re.findall("<small class=faint>(.*?)</small>", item) for item in items]
    assert words == [["baseline"], [], ["diverged"], []]


def test_caption_names_the_arms_that_end_above_the_frame(made: Report, page: str) -> None:
    said = f"{LABELS[2]} ends above the frame."
    assert page.count(said) == 6
    made = report()
    made.arms[2].label = NASTY
    assert f"{escape(NASTY)} ends above the frame." in render(made)


def test_loss_per_token_of_arms_with_other_tokenizers_is_warned_of_in_its_captions_only() -> None:
    two = report(2)
    assert "another tokenizer" not in render(two)
    two.arms[1].config |= {"tokenizer.vocab_size": 1024}
    captions = re.findall("<figcaption>(.*?)</figcaption>", render(two))
    warned = [UNLIKE in caption for caption in captions]
    assert warned == [False] * 3 + [True] * 3  # val bits/byte, then train loss, against three axes each


def test_caption_names_the_part_of_val_and_that_the_table_is_of_all() -> None:
    one = report(1, metrics=(BPB, TRAIN_LOSS))
    one.curves = [replace(curve, size=32_768.0) for curve in one.curves]
    val, *_, train = re.findall("<figcaption>(.*?)</figcaption>", render(one))
    assert val.endswith("</b> on the first 32,768 tokens of val; the table is of all of val")
    assert train.endswith("</b>")


@pytest.mark.parametrize(("n_arms", "bands"), [(8, True), (9, False)])
def test_bands_of_more_than_eight_arms_are_left_out_and_not_spoken_of(n_arms: int, bands: bool) -> None:
    page = render(report(n_arms))
    assert ('class="band"' in page) is bands
    assert ("bands: the lowest" in page) is bands
    assert '"low":' in page  # the pointer is still answered with them


def test_200_arms_stay_under_5_mb_thin_and_without_bands() -> None:
    page = render(report(200, n_points=2000))
    assert len(page.encode()) < 5e6
    assert 'class="band"' not in page
    assert page.count('class="arm c') == 1200
    assert 'class="arm c1" data-arm="1"' in page
    assert not re.findall(r'class="line" d="[^"]*" stroke-width="(?!1"|1\.8")', page)


def test_the_same_report_gives_the_same_page(made: Report, page: str) -> None:
    assert render(made) == page


def _linear(colour: str) -> np.ndarray:
    value = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def _cielab(linear: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ linear / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def _flat(arm: int, loss: float) -> Curve:
    x, y = [float(i) for i in range(1, 11)], [loss] * 10
    return Curve(arm, BPB, "tokens", x, y, y, y, 1)


def _data(page: str) -> str:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert unescape(text) == text
    return text
