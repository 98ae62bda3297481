"""DeepSpeed's launcher: its hostfiles, and its command line."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from galvatron_lite.launch.commands import read_hostfile
from tests.docs.pages import ROOT, text_of

HOSTS = "# two of them\nworker-1 slots=1\n\nworker-2 slots=1  # the slow one\n"


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text(HOSTS)
    return path


def test_hostfiles_are_read_as_deepspeed_reads_them(hostfile: Path) -> None:
    deepspeed = pytest.importorskip("deepspeed.launcher.runner")
    theirs = deepspeed.fetch_hostfile(str(hostfile))
    assert {host.name: host.slots for host in read_hostfile(hostfile)} == dict(theirs)


def test_its_launcher_takes_the_commands_of_the_page() -> None:
    runner = pytest.importorskip("deepspeed.launcher.runner")
    shown = re.findall(r"^deepspeed (--.*)$", text_of("docs/deepspeed.md"), re.MULTILINE)
    found = [shlex.split(words) for words in shown]
    assert [runner.parse_args(words).user_script for words in found] == ["train.py"] * 2
    assert [runner.parse_args(words).num_gpus for words in found] == [8, -1]
    assert runner.parse_args(found[1]).hostfile == "hosts"


def test_torchrun_takes_the_commands_of_the_pages() -> None:
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name != "api.md"]
    found = [
        words
        for page in pages
        for words in re.findall(r"torchrun (--[^;`\n]*train\.py)", page.read_text(encoding="utf-8"))
    ]
    assert len(found) >= 2
    for words in found:
        asked = get_args_parser().parse_args(shlex.split(words))
        assert asked.training_script == "train.py"
        assert int(asked.nproc_per_node) > 1
