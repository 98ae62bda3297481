"""Commands that the pages show: their options exist, and those that take seconds are run as they stand."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from galvatron_lite.cli import app

from .pages import PAGES, ROOT, commands, script_source, text_of

RUNS = "profiles/published/runs.jsonl"
EVERY = sorted({command for page in PAGES for command in commands(page.read_text(encoding="utf-8"))})
RUN = [
    command for command in EVERY
    if command.startswith(("galvatron validate ", "galvatron plan --model ")) and "…" not in command
]  # fmt: skip

ANSWERS = ("family", '"families"', "samples/s", "tokens/s", "GPU-hours", "none is beaten in both time and memory")
"""What the output of every command that is run has one of."""


def options_of(words: list[str]) -> set[str]:
    """Options of a command, or of its sub-command where one is named."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    command = commands["-".join(words[:2])] if words[:2] == ["profile", "import"] else commands[words[0]]
    within = getattr(command, "commands", {})
    named = within.get(words[1], command) if len(words) > 1 else command
    return {option for parameter in named.params for option in parameter.opts}


def test_there_are_commands() -> None:
    assert {words.split()[0] for words in EVERY} >= {"galvatron", "scripts/calibrate", "scripts/test"}
    assert sum(words.startswith("galvatron validate") for words in RUN) >= 5


@pytest.mark.parametrize("words", EVERY)
def test_options_exist(words: str) -> None:
    first, *rest = shlex.split(words)
    if rest[:1] == ["launch"]:
        rest = until_program(rest)
    given = {word.partition("=")[0] for word in rest if word.startswith("-")}
    if first == "galvatron":
        assert given <= options_of(rest)
        return
    source = script_source(first.removeprefix("scripts/"))
    for option in given:
        assert re.search(rf'["\']{option}["\']', source), option


def until_program(words: list[str]) -> list[str]:
    """A launch without the program's own words: a script, a module behind ``--``, ``profile MODEL``."""
    ends = [at for at, word in enumerate(words) if word.endswith(".py") or word in ("--", "profile")]
    return words[: min(ends, default=len(words))]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few of the published rows, the row of the page, and constants of one's own."""
    folder = tmp_path_factory.mktemp("place")
    lines = text_of(RUNS).splitlines()
    few = [line for number, line in enumerate(lines) if number % 90 == 0 or '"nanotron-' in line]
    (folder / RUNS).parent.mkdir(parents=True)
    (folder / RUNS).write_text("\n".join(few) + "\n")
    row = json.loads(text_of("docs/validate.md").split("```json\n")[1].split("```")[0])
    (folder / "mine.jsonl").write_text(json.dumps(row) + "\n")
    shutil.copytree(ROOT / "configs" / "calibration", folder / "constants")
    return folder


@pytest.mark.parametrize("words", RUN)
def test_commands_run(words: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    done = CliRunner().invoke(app, shlex.split(words)[1:])
    assert done.exit_code == 0, done.output
    assert any(word in done.output for word in ANSWERS)
    for path in re.findall(r"(?:--plot|-o) (\S+)", words):
        assert (place / path).stat().st_size > 0


def test_the_row_of_the_page_is_scored(place: Path) -> None:
    done = CliRunner().invoke(app, ["validate", str(place / "mine.jsonl"), "--json"])
    mine = json.loads(done.output)["families"]["mine"]
    assert (mine["rows"], mine["timed"], mine["weighed"]) == (1, 1, 1)
    # Its figures are made up, but as such a run might measure them.
    assert mine["time_mape"] < 50
    assert mine["memory_mape"] < 50
