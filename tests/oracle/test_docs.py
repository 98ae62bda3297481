"""The page of the oracle: its commands run, its figures are those of the code, its figure is the command's."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from galvatron_lite.cli import app
from galvatron_lite.oracle.closed_form import Quirk
from galvatron_lite.oracle.measured import measured_rows
from galvatron_lite.oracle.request import fabric_named
from galvatron_lite.oracle.rows import CAUSES, SPLIT_THRESHOLD, FindingKind

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
