"""The figure: what is drawn, and that it stays within its page."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from galvatron_lite.oracle.plot import _BARS, figure
from galvatron_lite.oracle.rows import CommunicationSeconds, Forecast, ForecastRow, Limit, StrategyLine

SVG = "{http://www.w3.org/2000/svg}"


def line(name: str, counts: tuple[int, ...], last: int | None = None) -> StrategyLine:
    moved = [CommunicationSeconds(layers=10.0 * p) for p in counts]
    rows = tuple(
        ForecastRow(name, p, 64, 10, 1000 / p, sent, update=5.0, waiting=1.0, memory=8e9, capacity=16e9)
        if last is None or p <= last
        else ForecastRow(name, p, 64, 1, problem=f"beyond its limit of {last} GPUs")
        for p, sent in zip(counts, moved, strict=True)
    )
    return StrategyLine(name, rows, Limit(last, "by hand"))


def drawn(*lines: StrategyLine) -> ElementTree.Element:
    text = figure(Forecast("a < b", "here & there", "paradl", 640, "measured: by hand", (), lines))
    return ElementTree.fromstring(text)


COUNTS = tuple(2**power for power in range(11))
NAMES = ("data", "spatial", "pipeline", "filter", "channel", "data+filter", "data+spatial", "data8 spatial2x1")


@pytest.mark.parametrize(("lines", "counts"), [(1, (8,)), (8, COUNTS)])
def test_a_panel_a_strategy(lines: int, counts: tuple[int, ...]) -> None:
    root = drawn(*(line(name, counts) for name in NAMES[:lines]))
    texts = ["".join(one.itertext()) for one in root.iter(f"{SVG}text")]
    for name in NAMES[:lines]:
        assert name in texts
    assert any(text.startswith("a < b on here & there") for text in texts)


def test_everything_lies_on_the_page() -> None:
    root = drawn(*(line(name, COUNTS, 64 if number % 2 else None) for number, name in enumerate(NAMES)))
    width, height = (float(root.attrib[side]) for side in ("width", "height"))
    for one in root.iter():
        for side, most in (("x", width), ("y", height)):
            if side in one.attrib:
                assert 0 <= float(one.attrib[side]) <= most
    for text in root.iter(f"{SVG}text"):
        long = 6.8 * len("".join(text.itertext()))
        start = float(text.attrib["x"]) - {"end": long, "middle": long / 2}.get(text.attrib["text-anchor"], 0)
        assert start >= -8
        assert start + long <= width + 24, "".join(text.itertext())


def test_bars_add_up() -> None:
    root = drawn(line("data", (1, 4)))
    bars = [
        one
        for one in root.iter(f"{SVG}g")
        if (title := one.find(f"{SVG}title")) is not None and "compute" in str(title.text)
    ]
    assert len(bars) == 2
    for bar in bars:
        assert sum(float(one.attrib["height"]) for one in bar.iter(f"{SVG}rect")) == pytest.approx(_BARS, abs=0.1)


def test_memory_that_does_not_fit_is_told_apart() -> None:
    tight = line("data", (1, 2))
    rows = (replace(tight.rows[0], memory=40e9), tight.rows[1])
    kinds = re.findall(r'<rect class="(c[34])" x="[\d.]+" y="[\d.]+" width="[\d.]+" height', figure(
        Forecast("net", "here", "paradl", 640, "measured: by hand", (), (replace(tight, rows=rows),))
    ))  # fmt: skip
    assert kinds[-2:] == ["c4", "c3"]


def test_where_a_strategy_ends_is_said_and_one_without_figures_left_out() -> None:
    texts = ["".join(one.itertext()) for one in drawn(line("filter", COUNTS, 64)).iter(f"{SVG}text")]
    assert "64 at most" in texts
    assert not list(drawn(line("filter", (8, 16), 4)).iter(f"{SVG}use"))
