"""The page of the oracle: its commands run, its figures are those of the code, its figure is the command's."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from galvatron_lite.cli import app
from galvatron_lite.oracle.closed_form import Quirk
from galvatron_lite.oracle.measured import measured_rows
from galvatron_lite.oracle.plot import _BARS, figure
from galvatron_lite.oracle.request import fabric_named
from galvatron_lite.oracle.rows import (
    CAUSES,
    SPLIT_THRESHOLD,
    CommunicationSeconds,
    FindingKind,
    Forecast,
    ForecastRow,
    Limit,
    StrategyLine,
)

from ..docs.pages import commands, text_of
from .printed import printed

PAGE = text_of("docs/oracle.md")
COMMANDS = sorted(set(commands(PAGE)) - {"galvatron plan --model"})
RUN = [words for words in COMMANDS if words.startswith("galvatron oracle ") and "--check" not in words]
"""``test_asked`` runs the check."""


@pytest.mark.parametrize("words", RUN)
def test_commands_run(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, shlex.split(words)[1:])
    assert done.exit_code == 0, done.output
    assert "communication" in done.output or "Mean accuracy" in done.output
    for path in re.findall(r"--plot (\S+)", words):
        # The closed forms change with nothing but themselves: the page's figure is this one.
        assert (tmp_path / path).read_text() == text_of("docs/oracle.svg")


def test_commands_quirks_and_settings_are_explained() -> None:
    assert len(RUN) >= 7
    every = " ".join(COMMANDS)
    assert all(word in every for word in ("--formulas paradl", "--strategy", "--check", "--json", "--plot"))
    assert len(PAGE.split()) < 2000
    for quirk in Quirk:
        assert f"| `{quirk.value}` |" in PAGE
    for name in fabric_named("abci").settings:
        assert f"`{name}`" in PAGE


def test_thresholds_are_those_of_the_code() -> None:
    for cause in CAUSES:
        mark = "L" if cause.sort is FindingKind.LIMITATION else "B"
        assert f"| {cause.name} ({mark}) | {100 * cause.threshold:.0f} % |" in PAGE
    assert f"| split work (B) | {100 * SPLIT_THRESHOLD:.0f} % |" in PAGE


def test_counts_of_rows_are_those_of_the_files() -> None:
    assert f"holds {sum(len(one.rows) for one in printed())} rows" in PAGE
    assert f"on {len(measured_rows())} measured rows" in PAGE


def test_golden_rows_of_the_page_are_printed_ones() -> None:
    known = {(devices, *figures) for one in printed() for devices, figures in one.rows.items()}
    told = re.findall(
        r"^\| [\w-]+ [\w+]+, \d+[\w ]* \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \| ([\d,.]+) \|$", PAGE, re.MULTILINE
    )
    assert len(told) == 5
    for cells in told:
        devices, *figures = (float(cell.replace(",", "")) for cell in cells)
        assert (int(devices), *figures) in known


def test_the_summary_of_accuracy_is_that_of_its_page() -> None:
    page = text_of("docs/oracle-accuracy.md")
    mean, data = (re.search(rf"^\| {name} \| (\d+) \| ([\d.]+ %)", page, re.MULTILINE) for name in ("all", "data"))
    order = re.search(r"right order in (\d+ of \d+) groups", page)
    assert mean
    assert data
    assert order
    assert f"over {mean[1]} rows the default formulas are {mean[2]} accurate" in PAGE
    assert f"over {data[1]} rows of data parallelism {data[2]}" in PAGE
    assert f"in {order[1]} groups" in PAGE


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


def test_everything_is_drawn_inside_the_figure() -> None:
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


def test_memory_that_does_not_fit_is_marked() -> None:
    tight = line("data", (1, 2))
    rows = (replace(tight.rows[0], memory=40e9), tight.rows[1])
    kinds = re.findall(r'<rect class="(c[34])" x="[\d.]+" y="[\d.]+" width="[\d.]+" height', figure(
        Forecast("net", "here", "paradl", 640, "measured: by hand", (), (replace(tight, rows=rows),))
    ))  # fmt: skip
    assert kinds[-2:] == ["c4", "c3"]


def test_limits_of_strategies_are_drawn_and_empty_ones_left_out() -> None:
    texts = ["".join(one.itertext()) for one in drawn(line("filter", COUNTS, 64)).iter(f"{SVG}text")]
    assert "64 at most" in texts
    assert not list(drawn(line("filter", (8, 16), 4)).iter(f"{SVG}use"))
