"""Tests of pictures, in which no text lies outside of the frame."""

import itertools

import numpy as np
import pytest

from kvjax.evaluate import pictures

POINTS = [(0.2, 0.1, 0.5), (0.4, 0.3, 0.9)]


@pytest.fixture
def sheets(monkeypatch):
    """Return a list of the figures that are made from here on."""
    made, make = [], pictures.figure

    def figure(*size):
        made.append(make(*size))
        return made[-1]

    monkeypatch.setattr(pictures, "figure", figure)
    return made


@pytest.mark.parametrize("titles", [1, 3, 8])
def test_scores_are_drawn_against_footprint_and_entries_kept(sheets, tmp_path, titles):
    methods = ["full", "a_method_with_a_long_name+quest"]
    panels = {f"task {n}, 1024 tokens, 192 answers": dict.fromkeys(methods, POINTS) for n in range(titles)}
    pictures.draw_tradeoff(tmp_path / "a.png", panels)
    (sheet,) = sheets
    assert [axes.get_xlabel() for axes in sheet.axes] == [*pictures.MEASURES] * titles
    for index, axes in enumerate(sheet.axes):
        for line in axes.lines:
            np.testing.assert_allclose(line.get_xdata(), [point[index % 2] for point in POINTS])
            np.testing.assert_allclose(line.get_ydata(), [50, 90])
    inside(sheet)


def test_lines_of_means_are_labelled_at_their_ends(sheets, tmp_path):
    long = "wgkv+snapkv:group=max,pooling=max,adakv.over=model,adakv.pinned=0.0"
    names = [*(f"method {n}" for n in range(6)), long]
    lines = {name: [(0.25, 0.9), (0.125, 0.5 + n / 1000)] for n, name in enumerate(names)}
    pictures.draw_means(tmp_path / "a.png", {"mean of 2 tasks, 2,048 tokens": (0.95, lines)})
    (sheet,) = sheets
    (axes,) = sheet.axes
    inside(sheet)
    *methods, level = axes.lines
    assert [line.get_ydata()[-1] for line in methods] == pytest.approx([50 + n / 10 for n in range(7)])
    assert level.get_ydata() == pytest.approx([95, 95])
    labels = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert list(labels) == [*names[:6], "wgkv+snapkv:group=max,p…", "full cache"]
    assert axes.get_window_extent().width > 0.5 * sheet.bbox.width
    below = list(labels.values())
    assert all(one.y1 < other.y0 for one, other in itertools.pairwise(below))
    assert all(box.x1 <= sheet.bbox.x1 for box in labels.values())
    assert [text.get_color() for text in axes.texts[:7]] == [line.get_color() for line in methods]


def test_maps_and_depths_fit_into_the_frame(sheets, tmp_path):
    maps = {"needle, 1024 tokens": {"0.1": np.ones((30, 3)), "0.2": np.zeros((30, 3))}}
    pictures.draw_kv_ratios(tmp_path / "a.png", "snapkv: kept entries, by budget", maps)
    rows = ["1024 (0.25)", "65536 (0.25)"]
    grid = np.array([[0.0, 1.0], [1.0, 0.5]])
    pictures.draw_depths(tmp_path / "b.png", "snapkv", grid, rows, [0.0, 1.0])
    for sheet in sheets:
        inside(sheet)


def inside(sheet):
    sheet.draw_without_rendering()
    frame = sheet.bbox
    texts = [text for axes in sheet.axes for text in (axes.xaxis.label, axes.yaxis.label, axes.title)]
    texts = [*filter(lambda text: text.get_text(), texts), *sheet.legends]
    assert len(texts) >= 3
    for text in texts:
        box = text.get_window_extent()
        assert frame.x0 <= box.x0 <= box.x1 <= frame.x1, text
        assert frame.y0 <= box.y0 <= box.y1 <= frame.y1, text
