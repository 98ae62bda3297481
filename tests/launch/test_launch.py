"""The commands that start a job, the checks before, a job on two hosts, and what its ranks say last."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from typer.testing import CliRunner

from galvatron_lite.cli import app
from galvatron_lite.errors import FileFormatError, GalvatronError, InputError, LaunchError, PeerError
from galvatron_lite.files import to_data
from galvatron_lite.launch.commands import PLAN_VARIABLE, THREADS, Host, Through, first_hosts, read_hostfile
from galvatron_lite.launch.error_reports import FOLDER_VARIABLE, last_words, listen
from galvatron_lite.launch.jobs import (
    MARK,
    NodeReport,
    check_nodes,
    job_of,
    output_of,
    read_reports,
    report,
    run_all,
)
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import write_plan
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Plan, Schedule, Stage

RUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan for four devices, beside a script."""
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_ID", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(THREADS, "3")
    (tmp_path / "train.py").write_text("print('trained')")
    stage = Stage((LayerRun("a", "a", 1, Strategy(data=4)),))
    write_plan(Plan(PLAN_VERSION, "m", 4, 4, 1, Schedule.GPIPE, "fp32", (stage,)), tmp_path / "plan.yaml")
    return tmp_path / "plan.yaml"


def hosts(folder: Path, text: str) -> Path:
    (folder / "hosts").write_text(text, errors="surrogateescape")
    return folder / "hosts"


def test_hostfiles(tmp_path: Path) -> None:
    path = hosts(tmp_path, "# ours\nworker-1 slots=4\n\nuser@10.0.0.2 slots = 4  # the other\nlast\n")
    found = read_hostfile(path)
    assert found == (Host("worker-1", 4), Host("user@10.0.0.2", 4), Host("last", 1))
    assert first_hosts(found, 4) == found[:1]
    assert first_hosts(found, 8) == found[:2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a slots=x", "line 1"),
        ("a slots=0", "slots=N"),
        ("a\na slots=2", "once"),
        ("# none", "names no host"),
        ("a; b", "line 1"),
        ("-oProxyCommand slots=1", "line 1"),
        ("a slots=\u0663", "line 1"),
        ("a slots=" + "9" * 5000, "line 1"),
        ("a slots=99999999", "line 1, slots"),
        ("a\udcff", "cannot be read"),
    ],
)
def test_hostfiles_that_cannot_be_read(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_hostfile(hosts(tmp_path, text))


@pytest.mark.parametrize(
    ("slots", "devices", "said"),
    [((4, 4), 16, "8 slots"), ((4, 2), 6, "nodes of equal size"), ((4, 4), 6, "do not fill")],
)
def test_hosts_that_cannot_be_used_are_refused(slots: tuple[int, ...], devices: int, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        first_hosts(tuple(Host(f"h{at}", each) for at, each in enumerate(slots)), devices)


def test_launching_on_this_machine(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(("train.py", "--lr", "1"), plan=Path("plan.yaml"))
    assert job.commands() == [[*RUN, "--nproc-per-node", "4", "--standalone", "train.py", "--lr", "1"]]
    assert job.environment == {THREADS: "3", PLAN_VARIABLE: str(plan)}
    monkeypatch.delenv(THREADS)
    assert job_of(("train.py",), plan=plan).environment[THREADS] == "1", "torchrun's choice where nothing is said"


def test_on_hosts(plan: Path) -> None:
    job = job_of(("train.py",), plan=plan, hostfile=hosts(plan.parent, "a slots=2\nb slots=2\nc slots=2"))
    both = job.commands()
    assert [words[:5] for words in both] == [["ssh", "-tt", "-o", "BatchMode=yes", host] for host in "ab"]
    for number, words in enumerate(both):
        place = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", "a", "--master-port", "29500"]
        remote = ["env", f"{THREADS}=3", f"{PLAN_VARIABLE}={plan}", *RUN, "--nproc-per-node", "2", *place, "train.py"]
        assert words[5] == f"cd {plan.parent} && exec {shlex.join(remote)}"


def test_nodes_that_start_again_meet_at_the_first(plan: Path) -> None:
    names = hosts(plan.parent, "a slots=2\nb slots=2")
    words = shlex.split(job_of(("train.py",), plan=plan, hostfile=names, restarts=3).commands()[1][5])
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in words, "workers of a new attempt do not meet by the old one's keys"
    assert words[words.index("--max-restarts") + 1] == "3"
    assert words[words.index("--rdzv-endpoint") + 1] == "a:29500"
    assert "--node-rank" not in words


def test_under_slurm(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    job = job_of(("train.py", "a b"), plan=plan, options=("--partition=gpu",))
    ((*srun, shell, flag, line),) = job.commands()
    assert (job.through, job.nodes, shell, flag) == (Through.SLURM, 2, "bash", "-c")
    assert srun[:4] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    assert srun[4:] == [f"--export=ALL,{THREADS}=3,{PLAN_VARIABLE}={plan}", f"--chdir={plan.parent}", "--partition=gpu"]
    # what bash makes of it, with scontrol and torchrun played by functions
    played = f'scontrol() {{ printf "n1\\nn2\\n"; }}; exec() {{ printf "%s|" "$@"; }}; {line}'
    environment = {**os.environ, "SLURM_JOB_NODELIST": "n[1-2]"}
    done = subprocess.run(["bash", "-c", played], env=environment, capture_output=True, text=True, check=True)
    meeting = ["--rdzv-backend", "c10d", "--rdzv-id", "7", "--rdzv-endpoint", "n1:29500"]
    expected = [*RUN, "--nproc-per-node", "2", "--nnodes", "2", *meeting, "train.py", "a b"]
    assert done.stdout.split("|")[:-1] == expected


@pytest.mark.parametrize(
    ("text", "nodes"), [("2", 2), ("a100:2", 2), ("", 1), ("0", 0), ("\u00b2", 0), ("-2", 0), ("a100:2,v100:2", 0)]
)
def test_gpus_of_a_node_as_slurm_has_them(plan: Path, monkeypatch: pytest.MonkeyPatch, text: str, nodes: int) -> None:
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", text)
    if nodes:
        assert job_of(("train.py",), plan=plan, through=Through.SLURM).nodes == nodes
        return
    with pytest.raises(InputError, match=r"SLURM_GPUS_ON_NODE.*--per-node"):
        job_of(("train.py",), plan=plan, through=Through.SLURM)


def test_on_ray(plan: Path) -> None:
    job = job_of(("-m", "train", "x"), plan=plan, through=Through.RAY, per_node=2)
    module = [sys.executable, "-m", "galvatron_lite.launch.ray_job"]
    assert job.commands() == [[*module, "--workers", "4", "--each", "2", "--", "-m", "train", "x"]]


def test_profiles_are_measured_by_launch(plan: Path) -> None:
    job = job_of(("profile", "train.py:make"), gpus=2)
    assert job.commands() == [
        [*RUN, "--nproc-per-node", "2", "--standalone", "-m", "galvatron_lite", "profile", "train.py:make"]
    ]
    assert plan.exists()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "--plan is missing"),
        ({"gpus": 0}, "from 1 to"),
        ({"gpus": 2**63}, "--gpus"),
        ({"gpus": 1, "port": -1}, "--port"),
        ({"gpus": 4, "through": Through.RAY, "per_node": 0}, "--per-node"),
        ({"plan": Path("plan.yaml"), "gpus": 8}, "The plan is for 4"),
        ({"program": ("none.py",), "gpus": 1}, "no such file"),
        ({"plan": Path("train.py")}, "version"),
        ({"gpus": 4, "through": Through.SSH}, "--hostfile"),
        ({"gpus": 4, "through": Through.SLURM, "per_node": 3}, "not a multiple"),
    ],
)
def test_bad_requests(plan: Path, asked: dict[str, Any], said: str) -> None:
    assert plan.exists()
    with pytest.raises(GalvatronError, match=said):
        job_of(**{"program": ("train.py",), **asked})


def test_nodes_that_differ_are_refused() -> None:
    good = NodeReport("a", "hash", {"torch": "2.13", "python": "3.11"}, 8, 80 * 2**30, 0)
    check_nodes([good, replace(good, host="b")], 2, 8, "hash", 70 * 2**30)
    bad = [
        good,
        replace(good, host="b", plan=""),
        replace(good, host="c", plan="other"),
        replace(good, host="d", versions={"torch": "2.12", "python": "3.11"}),
        replace(good, host="e", devices=4),
        replace(good, host="f", device_memory=40 * 2**30),
        replace(good, host="g", devices=0, host_memory=2**30),
    ]
    with pytest.raises(LaunchError) as caught:
        check_nodes(bad, 8, 8, "hash", 70 * 2**30)
    lines = str(caught.value).splitlines()[1:]
    assert [line.strip().split(" ")[0] for line in lines] == ["7", "b:", "c:", "d:", "e:", "f:", "g:"]
    for word, line in zip(["of 8", "not have", "another", "2.12", "4 GPUs", "40", "free"], lines, strict=True):
        assert word in line


def test_reports_survive_what_else_is_printed(plan: Path) -> None:
    own = report(plan)
    said = f"Welcome!\n{MARK}{json.dumps(to_data(own))}\nbye"
    assert read_reports(said) == [own]
    assert len(own.plan) == 64
    for broken in ("", "{", "[" * 9999, '{"host": "a", "plan": "", "devices": -1}', '{"host": "a", "host": "b"}'):
        with pytest.raises(FileFormatError, match="a node's report"):
            read_reports(MARK + broken)


def test_a_job_on_two_hosts(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh is played by a shell on this machine; torchrun and the check are real."""
    folder = plan.parent
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\nwhile [ "$1" != "BatchMode=yes" ]; do shift; done\nshift 2\nexec sh -c "$1"\n')
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    (folder / "train.py").write_text(
        "import os, pathlib\n"
        f"told = [os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', '{PLAN_VARIABLE}')]\n"
        "pathlib.Path('rank' + told[0]).write_text(' '.join(told))\n"
    )
    names = hosts(folder, "localhost slots=1\n127.0.0.1 slots=1")
    environment = {**os.environ, "PATH": f"{ssh.parent}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "galvatron_lite", "launch", "--gpus", "2", "--hostfile", str(names)]
    port = str(20000 + os.getpid() % 20000)
    done = subprocess.run(
        [*command, "--port", port, "train.py"], cwd=folder, env={**environment, PLAN_VARIABLE: "mine"},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [(folder / f"rank{rank}").read_text() for rank in (0, 1)] == ["0 2 0 mine", "1 2 0 mine"]
    assert done.stderr.count("--node-rank") == 2


def test_the_command_is_printed_and_nothing_started(plan: Path) -> None:
    done = CliRunner().invoke(app, ["launch", "--plan", str(plan), "--dry-run", "train.py", "--gpus", "9"])
    assert done.exit_code == 0
    wanted = f"{THREADS}=3 {PLAN_VARIABLE}={plan} {shlex.join(RUN)} --nproc-per-node 4 --standalone train.py --gpus 9"
    assert done.output.strip() == wanted


def test_the_job_ends_with_the_first_that_fails() -> None:
    for ending, status in [("exit 3", 3), ("kill -9 $$", 137)]:
        start = monotonic()
        assert run_all([["sleep", "60"], ["sh", "-c", ending]], {}) == status
        assert monotonic() - start < 30, "the other is ended, not waited for"
    assert run_all([["sh", "-c", 'test "$A" = b']] * 2, {"A": "b"}) == 0
    for command, said in [
        (["no-such-program"], "no program 'no-such-program'"), (["sh", "-c", "echo why; exit 2"], r"status 2:\nwhy"),
        (["sleep", "60"], "No answer in 0.1 s: sleep 60"),
    ]:  # fmt: skip
        with pytest.raises(LaunchError, match=said):
            output_of([command], {}, 0.1 if command[0] == "sleep" else 60)


PEER = PeerError("Rank 0 waited in vain.", ranks=(1,), operation="forward")
WRONG = InputError("mem", "lots", "Give 40GB.")


def end(rank: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a rank ends by an error that nothing catches."""
    monkeypatch.setenv("RANK", str(rank))
    sys.excepthook(type(error), error, None)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ({}, ""),
        ({0: ValueError("the user's")}, ""),
        ({0: PEER, 1: WRONG}, f"Rank 1: InputError: {WRONG}"),
        ({0: PEER}, f"Rank 0: PeerError: {PEER}"),
        (dict.fromkeys(range(3), WRONG), f"Rank 0, 1, 2: InputError: {WRONG}"),
        (dict.fromkeys(range(12), WRONG), f"Rank 0, 1, 2, 3 and 8 others: InputError: {WRONG}"),
    ],
)
def test_each_error_is_reported_once_and_waiting_only_without_another(
    ends: dict[int, Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    listen()
    listen()
    for rank, error in ends.items():
        end(rank, error, monkeypatch)
    assert shown == list(ends.values())
    assert last_words(tmp_path) == said


def test_nothing_is_kept_without_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.excepthook
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    listen()
    assert sys.excepthook is before
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: None)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "of another machine"))
    listen()
    end(0, GalvatronError("x"), monkeypatch)
    assert list(tmp_path.iterdir()) == []
