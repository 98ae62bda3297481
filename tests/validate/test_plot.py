"""The figure of predictions: what its XML holds against the runs it was drawn from."""

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.svg import COLOURS, KINDS, SHAPES, colour, decades, rounded, shape
from galvatron_lite.validate.report import OTHERS, scatter
from galvatron_lite.validate.results import ScoredRun, SkipError

from .runs import gpt, judged

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*runs: ScoredRun) -> ET.Element:
    return ET.fromstring(scatter(runs))


def marks(root: ET.Element) -> list[tuple[float, float]]:
    """Places of the marks in the plane; those of the legend are at the origin of a group that moves them."""
    every = [(float(use.attrib["x"]), float(use.attrib["y"])) for use in root.iter(f"{SVG}use")]
    return [place for place in every if place != (0.0, 0.0)]


def words(root: ET.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def test_every_scored_step_is_a_mark_and_every_family_a_row() -> None:
    root = drawn(
        judged(1.0, 1.0), judged(2.0, 1.0), judged(9.0, 10.0, family="a <b>"), ScoredRun(gpt(), None, SkipError("odd"))
    )
    assert len(marks(root)) == 3
    assert {"made-up (2)", "a <b> (1)"} <= set(words(root))
    # Errors of 0 and 100 %: a median of 50 %.
    assert "50.0 %" in words(root)
    assert "10.0 %" in words(root)


def test_equal_values_lie_on_the_diagonal_and_too_slow_ones_above_it() -> None:
    root = drawn(judged(0.1, 0.1), judged(5.0, 5.0), judged(4.0, 1.0))
    (x0, y0), (x1, y1), (x2, y2) = marks(root)
    slope = (y1 - y0) / (x1 - x0)
    assert slope == pytest.approx(-1.0, abs=0.01)
    assert y2 < y0 + slope * (x2 - x0)  # pixels grow downwards


def test_the_text_for_screen_readers() -> None:
    root = drawn(*(judged(1.0 + 0.04 * number, 1.0) for number in range(10)))
    said = {
        child.tag.removeprefix(SVG): child.text or "" for child in root if child.tag in (f"{SVG}title", f"{SVG}desc")
    }
    assert root.attrib["role"] == "img"
    assert "Predicted against measured" in said["title"]
    # Errors of 0, 4, ... 36 %: three of ten are within 10 %, seven within 25 %.
    assert "10 training runs: 30 % within 10 %, 70 % within 25 %" in said["desc"]
    assert "made-up (10 runs)" in said["desc"]


def test_a_figure_without_scored_runs() -> None:
    root = drawn(ScoredRun(gpt(), None, SkipError("odd")))
    assert not marks(root)
    assert "no step time is scored" in words(root)


def test_light_and_dark_have_a_colour_for_every_class_that_is_used() -> None:
    text = scatter([judged(1.0, 1.1, family=f"family {number}") for number in range(KINDS)])
    light, dark = text.split("@media")
    used = {name for names in re.findall(r'class="([^"]+)"', text) for name in names.split()}
    assert used
    for part in (light, dark[: dark.index("</style>")]):
        assert used <= set(re.findall(r"\.(\w+)\{", part))


def luminance(colour: str) -> float:
    """WCAG 2.2's relative luminance."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(("ground", "paper"), [(0, "#ffffff"), (1, "#0d1117")])
def test_marks_stand_out_from_the_ground(ground: int, paper: str) -> None:
    for pair in COLOURS:
        low, high = sorted((luminance(pair[ground]), luminance(paper)))
        assert (high + 0.05) / (low + 0.05) >= 3.0, pair


def test_families_differ_in_colour_or_shape() -> None:
    looks = {(colour(place), shape(place)) for place in range(KINDS)}
    assert len(looks) == KINDS == len(COLOURS) * len(SHAPES)


def test_more_families_than_marks_are_others_together() -> None:
    runs = [judged(1.0, 1.0, family=f"family {number}") for number in range(KINDS + 5)]
    names = words(drawn(*runs, judged(1.0, 1.0, family=f"family {KINDS + 4}")))
    assert f"{OTHERS} (6)" in names
    assert f"family {KINDS + 4} (2)" in names
    assert sum(name.startswith("family ") and name != "family (runs)" for name in names) == KINDS - 1


@given(st.lists(st.floats(1e-5, 1e6), min_size=1, max_size=20))
def test_scales_hold_all_values_between_round_ends(values: list[float]) -> None:
    low, high = rounded(values)
    assert low <= min(values) <= max(values) <= high
    for end in (low, high):
        digits = f"{end:.0e}"[0]
        assert digits in "125"
        assert end == pytest.approx(float(f"{end:.0e}"))
    assert high / low <= 25 * max(values) / min(values) or high / low <= 100
    assert all(low * 0.999 <= value <= high * 1.001 for value in decades(low, high))
