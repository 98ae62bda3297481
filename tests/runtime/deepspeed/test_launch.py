"""DeepSpeed's launcher: its hostfiles, and its command line."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from galvatron_lite.errors import LaunchError
from galvatron_lite.launch.commands import read_hostfile
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.runtime.deepspeed.launch import launch_command
from tests.docs.pages import ROOT, text_of
from tests.runtime.deepspeed.jobs import plan_of

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


def test_the_command_starts_as_many_processes_as_the_plan_has_devices(hostfile: Path) -> None:
    plan = plan_of(Strategy(zero=2, zero_stage=2))
    script = ["train.py", "--steps", "3"]
    alone = launch_command(plan, script)
    assert alone == ["deepspeed", "--no_local_rank", "--num_gpus", "2", *script]
    assert "--num_accelerators" in launch_command(plan, script, cpu=True)
    assert launch_command(plan, script, hostfile)[2:4] == ["--hostfile", str(hostfile)]
    with pytest.raises(LaunchError, match="has 2"):
        launch_command(plan_of(Strategy(zero=4, zero_stage=2)), script, hostfile)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeeds_own_parser_takes_the_command(hostfile: Path) -> None:
    from deepspeed.launcher.runner import parse_args

    plan = plan_of(Strategy(zero=2, zero_stage=2))
    read = parse_args(launch_command(plan, ["train.py", "--steps", "3"], hostfile)[1:])
    assert (read.hostfile, read.no_local_rank, read.user_script) == (str(hostfile), True, "train.py")
    assert read.user_args == ["--steps", "3"]


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
