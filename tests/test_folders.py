"""Folders that several jobs write beside one another, and what killed ones left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from galvatron_lite.errors import InputError
from galvatron_lite.folders import begin_folder, put_in_place

SEAL = "seal"
OTHER = "import sys; from galvatron_lite.folders import *; print(begin_folder(Path(sys.argv[1])), flush=True); input()"


def other_job(place: Path) -> tuple[subprocess.Popen[str], Path]:
    job = subprocess.Popen([sys.executable, "-c", OTHER, place], stdin=-1, stdout=-1, text=True)
    assert job.stdout is not None
    return job, Path(job.stdout.readline().strip())


def test_jobs_that_write_one_place(tmp_path: Path) -> None:
    place = tmp_path / "step-1"
    job, folder = other_job(place)
    with pytest.raises(InputError, match=rf"step-1.*Process {job.pid} is writing it.*folder of its own"):
        begin_folder(place, SEAL)
    assert list(tmp_path.iterdir()) == [folder], "the other job's is as it was, and nothing of ours is left"
    put_in_place(begin_folder(tmp_path / "step-2", SEAL), tmp_path / "step-2")
    assert folder.exists()
    job.kill()
    job.wait()
    put_in_place(begin_folder(place, SEAL), place)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-1", "step-2"]


@pytest.mark.parametrize("sealed", [False, True])
def test_what_killed_jobs_left(tmp_path: Path, sealed: bool) -> None:
    job, folder = other_job(tmp_path / "step-1")
    if sealed:
        (folder / SEAL).touch()
    job.kill()
    job.wait()
    elsewhere = tmp_path / f".step-1.part-another-{os.getpid()}-1-x"
    elsewhere.mkdir()
    begun = begin_folder(tmp_path / "step-2", SEAL)
    assert set(tmp_path.iterdir()) == {begun, elsewhere, *([folder] if sealed else [])}
