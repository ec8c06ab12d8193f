"""What a reader can do with the page: sort, filter, switch, hover, hide, all by keyboard too, on any screen.

Screenshots of it, wide and narrow, light and dark, go to build/screenshots/.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.report.synthetic import LABELS

Open = Callable[..., Any]
STATE = 8  # the column of the report with five axes
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
SCREENS = {"wide": {"width": 1600, "height": 1000}, "narrow": {"width": 380, "height": 800}}


def column(page: Any, n: int, table: str = "arms") -> list[str]:
    """The texts of column `n` (from 1), of the rows shown, from top to bottom."""
    cells = page.locator(f"table[data-name={table}] tbody tr:not(.none):not([hidden]) > :nth-child({n})")
    return [text.strip() for text in cells.all_inner_texts()]


def head(page: Any, title: str, table: str = "arms") -> Any:
    return page.locator(f"table[data-name={table}] thead th", has=page.get_by_role("button", name=title, exact=True))


def sort_by(page: Any, title: str) -> str:
    button = head(page, title).get_by_role("button")
    button.click()
    return str(head(page, title).get_attribute("aria-sort"))


def shown_figure(page: Any) -> tuple[str, str]:
    (figure,) = page.locator("figure:visible").all()
    return figure.get_attribute("data-metric"), figure.get_attribute("data-x")


def hover_at(page: Any, x_frac: float, y_frac: float = 0.5) -> Any:
    """Point at a place in the plot; the box with the values."""
    plot = page.locator("figure:visible .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] * x_frac, box["y"] + box["height"] * y_frac)
    return page.locator("figure:visible .tip")


# ---------------------------------------------------------------- tables


def test_numbers_sort_as_numbers_and_missing_comes_last_both_ways(open_page: Open) -> None:
    page = open_page()
    assert column(page, 3) == ["9k", "10k", "11k", "12k"]
    assert sort_by(page, "tokens") == "ascending"
    assert column(page, 3) == ["9k", "10k", "11k", "12k"]
    assert sort_by(page, "tokens") == "descending"
    assert column(page, 3) == ["12k", "11k", "10k", "9k"]
    assert sort_by(page, "val bits/byte") == "ascending"
    assert column(page, 4) == ["1.7000 ± 0.0040", "1.7400 ± 0.0040", "1.8200 ± 0.0040", "–"]
    assert head(page, "tokens").get_attribute("aria-sort") == "none"
    assert sort_by(page, "val bits/byte") == "descending"
    assert column(page, 4) == ["1.8200 ± 0.0040", "1.7400 ± 0.0040", "1.7000 ± 0.0040", "–"]


def test_a_third_click_restores_the_order_of_the_report(open_page: Open) -> None:
    page = open_page()
    for wanted in ("ascending", "descending", "none"):
        assert sort_by(page, "arm") == wanted
    assert column(page, 1) == list(LABELS)


def test_sorting_works_by_keyboard(open_page: Open) -> None:
    page = open_page()
    page.get_by_label("filter arms").focus()
    page.keyboard.press("Tab")  # the table's own scroll container
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "arm"
    page.keyboard.press("Enter")
    assert head(page, "arm").get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Space")
    assert head(page, "arm").get_attribute("aria-sort") == "descending"
    # Descending, words: rmsnorm before layernorm; rope, alibi, name within rmsnorm.
    assert column(page, 1) == [LABELS[0], LABELS[2], LABELS[3], LABELS[1]]


@pytest.mark.parametrize(
    ("words", "arms"),
    [
        ("rmsnorm", [0, 2, 3]),
        ("RMSNORM rope", [0]),
        ("norm=layernorm", [1]),
        ("norm=rms", []),
        ("nosuchkey=1", []),
        ("-norm=layernorm", [0, 2, 3]),
        ("-rmsnorm", [1]),
        ("state=diverged", [2]),
        ("tokens=9000", [0]),
        ("tokens=9k", [0]),
        ("tokens=9", []),
        ("parameters=1.0e6", [1]),
        ("rmsnorm -diverged -planned", [0]),
        ("nothing-like-it", []),
        ("<script>", [3]),
        ("-", [0, 1, 2, 3]),
        ("  ", [0, 1, 2, 3]),
    ],
)
def test_filter(open_page: Open, words: str, arms: list[int]) -> None:
    page = open_page()
    page.get_by_label("filter arms").fill(words)
    assert column(page, 1) == [LABELS[i] for i in arms]
    said = f"{len(arms)} of 4" if words.strip(" -") else ""
    assert page.locator("output").first.inner_text() == said
    assert page.get_by_text("No row matches.").first.is_visible() == (not arms)
    dimmed = page.locator("figure:visible .arm.dim")
    assert dimmed.count() == 4 - len(arms)


@pytest.mark.parametrize(
    ("words", "states"),
    [
        ("state=stopped", ["2/3 · 1 stopped"]),
        ("state=diverged", ["1/2 · 1 diverged"]),
        ("state=finished", ["2/2", "2/3 · 1 stopped", "1/2 · 1 diverged"]),
        ("-state=diverged", ["2/2", "2/3 · 1 stopped"]),
        ("state=", []),
    ],
)
def test_filter_by_the_state_of_any_run_of_an_arm(open_page: Open, words: str, states: list[str]) -> None:
    page = open_page("five axes")
    page.get_by_label("filter arms").fill(words)
    assert column(page, STATE) == states


def test_states_sort_by_the_share_of_runs_that_finished(open_page: Open) -> None:
    page = open_page("five axes")
    assert sort_by(page, "state") == "ascending"
    assert column(page, STATE) == ["1/2 · 1 diverged", "2/3 · 1 stopped", "2/2"]


def test_escape_clears_the_filter(open_page: Open) -> None:
    page = open_page()
    page.get_by_label("filter arms").fill("diverged")
    assert len(column(page, 1)) == 1
    page.keyboard.press("Escape")
    assert len(column(page, 1)) == 4
    assert page.locator(".dim").count() == 0


def test_runs_fold_out_sort_and_filter_on_their_own(open_page: Open) -> None:
    page = open_page()
    assert not page.locator("table[data-name=runs]").is_visible()
    page.locator("#runs > summary").click()
    assert len(column(page, 1, "runs")) == 8
    head(page, "seed", "runs").get_by_role("button").click()
    assert column(page, 2, "runs") == ["0"] * 4 + ["1"] * 4
    page.get_by_label("filter runs").fill("state=finished seed=1")
    assert column(page, 2, "runs") == ["1", "1"]
    assert len(column(page, 1)) == 4
    assert page.locator(".dim").count() == 0


# ---------------------------------------------------------------- curves


def test_one_figure_is_shown_and_buttons_switch_it(open_page: Open) -> None:
    page = open_page()
    assert shown_figure(page) == ("val/bits_per_byte", "tokens")
    seconds = page.get_by_role("button", name="seconds", exact=True)
    seconds.click()
    # The pointer is still on it, and its words must not vanish into the ground.
    assert seconds.evaluate("n => getComputedStyle(n).backgroundColor") == "rgb(0, 103, 163)"
    assert shown_figure(page) == ("val/bits_per_byte", "elapsed_s")
    page.get_by_role("button", name="train loss", exact=True).click()
    assert shown_figure(page) == ("train/loss", "elapsed_s")
    page.get_by_role("button", name="FLOPs", exact=True).press("Enter")
    assert shown_figure(page) == ("train/loss", "flops")
    pressed = page.locator(".switch [aria-pressed=true]").all_inner_texts()
    assert pressed == ["train loss", "FLOPs"]


def test_hover_shows_every_arm_at_the_nearest_point(open_page: Open) -> None:
    page = open_page()
    tip = hover_at(page, 0.999)
    assert tip.is_visible()
    # At the end, 2000 steps of 4096 tokens; the values are those the synthetic report ends with, the highest first.
    assert tip.locator("div").first.inner_text().replace("\u202f", "") == "tokens 8192000"
    assert tip.locator("tr td:nth-child(1)").all_inner_texts() == [LABELS[3], LABELS[1], LABELS[0]]
    assert tip.locator("tr td:nth-child(2)").all_inner_texts() == ["1.8200", "1.7400", "1.7000"]
    assert page.locator("figure:visible .dot").count() == 3
    page.mouse.move(5, 5)
    assert not tip.is_visible()


def test_hover_says_the_diverged_arm_where_it_still_was(open_page: Open) -> None:
    page = open_page()
    assert LABELS[2] in hover_at(page, 0.3).inner_text()
    assert LABELS[2] not in hover_at(page, 0.7).inner_text()


def test_arrow_keys_go_along_the_curve(open_page: Open) -> None:
    page = open_page()
    page.locator("figure:visible .frame").focus()
    tip = page.locator("figure:visible .tip div").first
    page.keyboard.press("ArrowRight")
    assert tip.inner_text().replace("\u202f", "") == "tokens 40960"
    page.keyboard.press("End")
    assert tip.inner_text().replace("\u202f", "") == "tokens 8192000"
    page.keyboard.press("ArrowLeft")
    assert tip.inner_text().replace("\u202f", "") == "tokens 7784448"
    page.keyboard.press("Escape")
    assert not page.locator("figure:visible .tip").is_visible()


def test_a_legend_entry_hides_its_arm_and_brings_it_back(open_page: Open) -> None:
    page = open_page()
    entry = page.locator(".legend button").nth(1)
    line = page.locator("figure:visible .arm[data-arm='1']")
    assert (entry.get_attribute("aria-pressed"), line.evaluate("n => getComputedStyle(n).display")) == (
        "true",
        "inline",
    )
    entry.press("Enter")
    assert (entry.get_attribute("aria-pressed"), line.evaluate("n => getComputedStyle(n).display")) == ("false", "none")
    assert LABELS[1] not in hover_at(page, 0.999).inner_text()
    entry.click()
    assert line.evaluate("n => getComputedStyle(n).display") == "inline"
    assert LABELS[1] in hover_at(page, 0.999).inner_text()


def test_filtered_arms_leave_the_values_too(open_page: Open) -> None:
    page = open_page()
    page.get_by_label("filter arms").fill("rope")
    assert hover_at(page, 0.999).locator("tr td:nth-child(1)").all_inner_texts() == [LABELS[1], LABELS[0]]


# ---------------------------------------------------------------- screens


@pytest.mark.parametrize("n_arms", [4, 200])
@pytest.mark.parametrize("width", [380, 700, 900, 1600])
def test_the_page_never_scrolls_sideways(open_page: Open, width: int, n_arms: int) -> None:
    page = open_page(n_arms, viewport={"width": width, "height": 800})
    page.locator("#runs > summary").click()
    hover_at(page, 0.9)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.body.scrollWidth") <= width


def test_nothing_is_cut_off_on_a_wide_screen_with_five_axes(open_page: Open) -> None:
    page = open_page("five axes", viewport={"width": 1500, "height": 900})
    scroll = page.locator(".scroll").first
    assert scroll.evaluate("n => n.scrollWidth - n.clientWidth") == 0
    assert len(column(page, STATE + 6)) == 3  # the last column


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_shadow_says_that_there_is_more_to_the_right(open_page: Open, scheme: str) -> None:
    page = open_page("five axes", viewport={"width": 700, "height": 900}, color_scheme=scheme)
    scroll = page.locator(".scroll").first
    paper = {"light": 255, "dark": 28}[scheme]
    assert _brightness_at_the_right_edge(scroll) < paper - 8
    scroll.evaluate("n => { n.scrollLeft = n.scrollWidth; }")
    assert _brightness_at_the_right_edge(scroll) == paper


def _brightness_at_the_right_edge(scroll: Any) -> int:
    """Of the ground between the last row's text and the table's border, 3 pixels in."""
    image = Image.open(io.BytesIO(scroll.screenshot())).convert("L")
    return int(image.getpixel((image.width - 4, image.height - 12)))


@pytest.mark.parametrize("width", [380, 700])
def test_the_first_column_stays_while_the_others_scroll(open_page: Open, width: int) -> None:
    page = open_page("five axes", viewport={"width": width, "height": 900})
    page.locator("#runs > summary").click()
    for table in ("arms", "runs"):
        first, second = (page.locator(f"[data-name={table}] tbody tr:first-child > :nth-child({n})") for n in (1, 2))
        before, moved = first.bounding_box(), second.bounding_box()["x"]
        first.evaluate("n => { n.closest('.scroll').scrollLeft = 100; }")
        assert first.bounding_box() == before
        assert second.bounding_box()["x"] == moved - 100
        assert before["width"] < width / 2  # room for the others
        head_box = page.locator(f"[data-name={table}] thead th").first.bounding_box()
        assert head_box["x"] == before["x"]


@pytest.mark.parametrize("width", [380, 1000, 1500])
def test_words_beside_a_name_in_the_legend_never_break(open_page: Open, width: int) -> None:
    page = open_page("five axes", viewport={"width": width, "height": 900})
    (said,) = page.locator(".legend small").all()
    assert said.inner_text() == "baseline"
    lines = "n => { const r = document.createRange(); r.selectNodeContents(n); return r.getClientRects().length; }"
    assert said.evaluate(lines) == 1


def test_without_javascript_all_is_there(open_page: Open) -> None:
    page = open_page(java_script_enabled=False)
    assert column(page, 1) == list(LABELS)
    assert page.locator("figure:visible").count() == 6
    assert page.locator("button, input").count() == 0
    assert page.locator(".legend li:visible").count() == 4
    page.locator("#runs > summary").click()
    assert len(column(page, 1, "runs")) == 8


def test_print_shows_all_figures_and_no_controls(open_page: Open) -> None:
    page = open_page()
    page.emulate_media(media="print")
    assert page.locator("figure:visible").count() == 6
    assert page.locator("input:visible, .switches button:visible").count() == 0


def test_dark_and_light_follow_the_system(open_page: Open) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    stroke = "getComputedStyle(document.querySelector('.arm.c0 .line')).stroke"
    light, dark = (open_page(color_scheme=scheme) for scheme in ("light", "dark"))
    assert (light.evaluate(paper), light.evaluate(stroke)) == ("rgb(252, 252, 251)", "rgb(26, 26, 26)")
    assert (dark.evaluate(paper), dark.evaluate(stroke)) == ("rgb(20, 21, 23)", "rgb(242, 242, 242)")


def test_200_arms_open_sort_filter_and_answer_quickly(open_page: Open) -> None:
    began = time.monotonic()
    page = open_page(200)
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert time.monotonic() - began < 6  # 3 s on a quiet machine
    assert len(column(page, 1)) == 200
    sort_by(page, "val bits/byte")
    values = [float(text.split()[0]) for text in column(page, 4)[:-1]]
    assert values == sorted(values)
    assert column(page, 4)[-1] == "–"
    tip = hover_at(page, 0.6)
    assert tip.locator("tr").count() == 12
    assert "and 187 more" in tip.inner_text()
    page.get_by_label("filter arms").fill("d_ff=1273")
    assert column(page, 1) == []
    page.get_by_label("filter arms").fill("d_ff=12736")
    assert column(page, 1) == ["ffn.d_ff=12736 norm=dyt"]
    legend = page.locator(".legend")
    assert legend.evaluate("n => n.scrollHeight > n.clientHeight && n.clientHeight < 700")


@pytest.mark.parametrize("n_arms", [4, 200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", list(SCREENS))
def test_screenshots(open_page: Open, screen: str, scheme: str, n_arms: int) -> None:
    page = open_page(n_arms, viewport=SCREENS[screen], color_scheme=scheme)
    hover_at(page, 0.4)
    path = SCREENSHOTS / f"report-{n_arms}-{screen}-{scheme}.png"
    page.screenshot(path=path, full_page=True)
    assert path.stat().st_size > 10_000


# ---------------------------------------------------------------- long contexts

COLLISIONS = """() => [...document.querySelectorAll(".longs .plot, .maps .plot")].flatMap((plot) => {
  const card = plot.closest(".longs > div, .maps > div").getBoundingClientRect();
  const texts = [...plot.querySelectorAll("text")].filter((node) => node.textContent);
  const boxes = texts.map((node) => [node.textContent, node.getBoundingClientRect()]);
  const out = boxes.filter(([, box]) => box.left < card.left || box.right > card.right || box.bottom > card.bottom);
  const met = boxes.flatMap(([word, a], i) => boxes.slice(i + 1)
    .filter(([, b]) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)
    .map(([other]) => `${word} | ${other}`));
  return [...out.map(([word]) => `outside: ${word}`), ...met];
})"""


@pytest.mark.parametrize("width", [390, 1280, 1900])
def test_words_of_long_context_drawings_keep_apart(open_page: Any, width: int) -> None:
    page = open_page("long contexts", viewport={"width": width, "height": 900})
    assert page.locator(".longs .plot").count() == 7
    assert page.locator(".maps .plot").count() == 4
    assert page.evaluate(COLLISIONS) == []
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
