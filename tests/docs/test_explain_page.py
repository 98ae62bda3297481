"""The page of explanations: its commands run as they stand, and print what it shows."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from galvatron_lite.cli import app

from .pages import ROOT, commands, text_of

PROFILE = "profiles/CPU-AMD-EPYC-x2-5bce98/quickstart-profile.yaml"


def test_the_page_shows_what_its_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "118")
    page = text_of("docs/explain.md")
    (tmp_path / PROFILE).parent.mkdir(parents=True)
    shutil.copy(ROOT / PROFILE, tmp_path / PROFILE)
    (tmp_path / "hand.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    printed = ""
    for words in (words for words in commands(page) if words.startswith("galvatron ") and ".yaml" in words):
        done = CliRunner().invoke(app, shlex.split(words)[1:])
        assert done.exit_code == 0, done.output
        printed += done.output
    lines = {line.rstrip() for line in printed.splitlines()}
    shown = [
        line for block in re.findall(r"^```\n(.*?)^```", page, re.DOTALL | re.MULTILINE) for line in block.splitlines()
    ]
    assert len(shown) > 60
    assert [line for line in shown if line.rstrip() not in lines] == []
