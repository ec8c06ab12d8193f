"""Figures: which files, what they say, the same bytes again, and nothing of the user's settings touched."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmlab.errors import RunError
from lmlab.report.curve_svg import diverged, frame
from lmlab.report.figures import draw, drawn
from lmlab.report.model import BPB, TRAIN_LOSS, Report
from lmlab.report.palette import LIGHT
from tests.report.synthetic import LABELS, report


@pytest.fixture(scope="module")
def made() -> Report:
    return report()


@pytest.fixture(scope="module")
def folder(made: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures")
    draw(made, folder, ("svg", "pdf"))
    return folder


def test_a_file_per_axis_and_kind(made: Report, tmp_path: Path) -> None:
    written = draw(made, tmp_path / "new" / "folder", ("svg",))
    assert [path.name for path in written] == ["loss-tokens.svg", "loss-flops.svg", "loss-elapsed_s.svg"]
    assert all(path.stat().st_size > 1000 for path in written)


def test_pdf_is_a_pdf(folder: Path) -> None:
    assert {p.name for p in folder.glob("*.pdf")} == {"loss-tokens.pdf", "loss-flops.pdf", "loss-elapsed_s.pdf"}
    assert all(p.read_bytes().startswith(b"%PDF-") for p in folder.glob("*.pdf"))


def test_axes_name_what_they_show_with_units(folder: Path) -> None:
    flops, seconds = (folder / f"loss-{axis}.svg" for axis in ("flops", "elapsed_s"))
    assert ">validation loss (bits per byte)<" in flops.read_text()
    assert ">training FLOPs (×10¹³)<" in flops.read_text()
    assert ">training time (seconds)<" in seconds.read_text()
    assert ">8M<" in (folder / "loss-tokens.svg").read_text()


def test_legend_names_every_arm_literally(folder: Path) -> None:
    text = (folder / "loss-tokens.svg").read_text()
    assert all(f">{label}<" in text for label in LABELS[:2])
    assert "&lt;script&gt;" in text
    assert "<script" not in text


def test_colours_are_those_of_the_page(folder: Path) -> None:
    text = (folder / "loss-tokens.svg").read_text()
    assert all(f"stroke: {LIGHT[i]}" in text for i in (0, 1, 2, 3))
    assert f"stroke: {LIGHT[4]}" not in text


def test_the_same_report_gives_the_same_bytes_at_any_time(made: Report, folder: Path, tmp_path: Path) -> None:
    for again in draw(made, tmp_path, ("svg", "pdf")):
        assert again.read_bytes() == (folder / again.name).read_bytes(), again.name
        assert b"CreationDate" not in again.read_bytes()
        assert b"dc:date" not in again.read_bytes()


def test_user_settings_neither_matter_nor_change(made: Report, folder: Path, tmp_path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"font.size": 31.0, "axes.facecolor": "red", "lines.linestyle": ":"}):
        before = dict(matplotlib.rcParams)
        (path, *_) = draw(made, tmp_path, ("svg",))
        assert dict(matplotlib.rcParams) == before
    assert path.read_bytes() == (folder / path.name).read_bytes()


def test_names_that_matplotlib_would_read_as_formulas_or_hide(tmp_path: Path) -> None:
    odd = report(2)
    odd.arms[0].label, odd.arms[1].label = "a=$\\frac{1$ b", "_hidden"
    text = draw(odd, tmp_path, ("svg",))[0].read_text()
    assert ">a=$\\frac{1$ b<" in text
    assert "_hidden<" in text


def test_without_curves_nothing_is_written(tmp_path: Path) -> None:
    bare = report(2, metrics=(TRAIN_LOSS,))
    assert draw(bare, tmp_path / "figures", ("svg", "pdf")) == []
    assert not (tmp_path / "figures").exists()
    bare.curves = [c for c in report(2, metrics=(BPB,)).curves if c.x_name == "flops"]
    assert [p.name for p in draw(bare, tmp_path, ("pdf",))] == ["loss-flops.pdf"]


@pytest.mark.parametrize("kind", ["svg", "pdf"])
def test_a_folder_that_can_not_be_written_to_is_an_error_with_its_remedy(tmp_path: Path, kind: str) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    with pytest.raises(RunError) as caught:
        draw(report(1), taken, (kind,))
    assert str(caught.value) == f"error: can't write {taken}: File exists\nhint: name another folder: --out DIR"


def test_legend_says_of_an_arm_that_it_diverged_and_is_above_the_frame(folder: Path, tmp_path: Path) -> None:
    assert f">{LABELS[2]} (diverged, above the frame)<" in (folder / "loss-tokens.svg").read_text()
    without = report()
    without.curves = [curve for curve in without.curves if curve.arm != 2]
    without.arms[1].runs = without.arms[1].runs[:1]
    text = draw(without, tmp_path, ("svg",))[0].read_text()
    assert f">{LABELS[2]} (diverged)<" in text
    assert f">{LABELS[1]}<" in text


def test_axis_names_the_part_of_val_that_was_looked_at(tmp_path: Path) -> None:
    one = report(1)
    one.curves = [replace(curve, size=32_768.0) for curve in one.curves]
    text = draw(one, tmp_path, ("svg",))[0].read_text()
    assert "validation loss (bits per byte)" in text
    assert "on the first 32,768 tokens of val" in text


@pytest.mark.parametrize(("n_arms", "n_bands"), [(8, 7), (9, 0)])
def test_bands_of_more_than_eight_arms_are_left_out(n_arms: int, n_bands: int) -> None:
    figure = _drawn(report(n_arms))
    assert len(figure.axes[0].collections) == n_bands  # arm 3 has one seed


@pytest.mark.parametrize("n_arms", [2, 8, 20, 24, 25, 60])
def test_legend_stands_clear_of_ticks_and_axis_title(n_arms: int) -> None:
    made = report(n_arms)
    for arm in made.arms:
        arm.label = f"optim.lr={arm.label[-12:]}"
    figure = _drawn(made)
    figure.canvas.draw()
    axes = figure.axes[0]
    legend = axes.get_legend().get_window_extent()
    texts = [*axes.get_xticklabels(), *axes.get_yticklabels(), axes.xaxis.label, axes.yaxis.label]
    assert not any(legend.overlaps(text.get_window_extent().padded(2)) for text in texts)
    assert not legend.overlaps(axes.get_window_extent())
    if n_arms <= 24:  # beside the plot it is no taller than the whole figure
        assert legend.height <= figure.bbox.height


def test_many_arms_fit(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    (path, *_) = draw(report(40, n_points=5), tmp_path, ("svg",))
    assert path.read_text().count("norm=dyt<") == 36
    assert not list(recwarn)
    assert os.path.getsize(path) < 1e6


def _drawn(made: Report) -> Any:
    curves = [c for c in made.curves if (c.metric, c.x_name) == (BPB, "tokens")]
    shown = frame(curves, diverged(made))
    assert shown is not None
    return drawn(made, curves, shown)
