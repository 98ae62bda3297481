"""Commands that the pages show: their options exist, and they run, as they stand or as a table says."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from galvatron_lite.cli import app

from .command_table import ELSEWHERE, INSTEAD, MADE, MENTIONS, RUN_BY, SAYS
from .pages import PAGES, ROOT, commands, named, script_source
from .place import PLANS, galvatron, place_of

SHOWN = {named(page): list(commands(page.read_text(encoding="utf-8"))) for page in PAGES}
EVERY = sorted({words for shown in SHOWN.values() for words in shown})


def _to_run() -> dict[str, list[str]]:
    """Commands of each page that no page before it has, and that nothing else runs."""
    seen = {MADE, *MENTIONS, *RUN_BY, *(words for page in ELSEWHERE for words in SHOWN[page])}
    found: dict[str, list[str]] = {}
    for page in sorted(SHOWN, key=lambda name: name == "README.md"):
        new = [words for words in dict.fromkeys(SHOWN[page]) if words not in seen and words.startswith("galvatron ")]
        seen |= set(new)
        found |= {page: new} if new else {}
    return found


RUN = _to_run()


def options_of(words: list[str]) -> set[str]:
    """Options of a command, or of its sub-command where one is named."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    command = commands.get("-".join(words[:2])) or commands[words[0]]
    within = getattr(command, "commands", {})
    named = within.get(words[1], command) if len(words) > 1 else command
    return {option for parameter in named.params for option in parameter.opts}


def test_the_pages_have_commands() -> None:
    assert {words.split()[0] for words in EVERY} >= {"galvatron", "scripts/calibrate", "scripts/test"}
    assert sum(len(found) for found in RUN.values()) > 60


def test_tables_are_of_commands_that_are_there() -> None:
    assert {MADE, *MENTIONS, *INSTEAD, *RUN_BY} <= set(EVERY)
    assert all(instead.why for instead in INSTEAD.values())
    assert set(PLANS) <= set(RUN)
    assert all('"verify"' in (ROOT / test).read_text(encoding="utf-8") for test in RUN_BY.values())
    for page, test in ELSEWHERE.items():
        assert page in (ROOT / test).read_text(encoding="utf-8")


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


@pytest.mark.parametrize("page", RUN)
def test_commands_run(page: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_of(page, made, tmp_path)
    monkeypatch.chdir(place)
    for words in RUN[page]:
        asked = INSTEAD[words].words if words in INSTEAD else words
        printed = galvatron(asked.replace("galvatron launch ", "galvatron launch --dry-run "))
        assert re.search(says(asked), printed), f"{asked}\n{printed}"
        for path in re.findall(r"(?:--plot|--trace|-o) (\S+)", asked):
            assert (place / path).stat().st_size > 0, asked


def says(words: str) -> str:
    """What a command prints, as a regular expression."""
    return next(said for begin, said in SAYS.items() if words.startswith(f"galvatron {begin} "))


def test_the_row_of_the_page_is_scored(made: Path) -> None:
    done = CliRunner().invoke(app, ["validate", str(made / "mine.jsonl"), "--json"])
    mine = json.loads(done.output)["families"]["mine"]
    assert (mine["rows"], mine["timed"], mine["weighed"]) == (1, 1, 1)
    # Its figures are made up, but as such a run might measure them.
    assert mine["time_mape"] < 50
    assert mine["memory_mape"] < 50
