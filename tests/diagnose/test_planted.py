"""Planted causes on real processes: the cause is named, and its size is right to a fifth; from traces and from logs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from galvatron_lite.diagnose.diagnosis import Diagnosis, _of_run, diagnose, find_profile, open_source, updated
from galvatron_lite.diagnose.findings import Cause, Finding
from galvatron_lite.profiler.schema import OriginKind
from galvatron_lite.runs.schema import read_run
from tests.diagnose.jobs import BLOCKS, MORE, plant_all, plant_in_a_stage
from tests.pool import WorkerPool


def _from_traces(folder: Path) -> Diagnosis:
    source = open_source(folder)
    return diagnose(source, find_profile(source))


def _from_log(folder: Path) -> Diagnosis:
    source = _of_run(replace(read_run(folder), traces=()))
    return diagnose(source, find_profile(source))


Diagnose = Callable[[Path], Diagnosis]


@pytest.fixture(scope="module")
def runs(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    folder = tmp_path_factory.mktemp("planted")
    return folder, pool.run(2, plant_all, timeout=600.0, folder=str(folder))[0]


HOW = pytest.mark.parametrize("read", [_from_traces, _from_log])
Runs = tuple[Path, dict[str, float]]


def _worst(found: Diagnosis) -> Finding:
    """The cause that costs most of what is within steps."""
    return next(one for one in found.findings if one.cause is not Cause.BETWEEN)


@HOW
def test_nothing_planted_is_nothing_large(runs: Runs, read: Diagnose) -> None:
    found = read(runs[0] / "nothing")
    assert all(abs(one.seconds) < MORE for one in found.findings)
    assert found.seconds == pytest.approx(found.predicted, abs=MORE)


def test_slow_layers_are_named_and_so_is_their_size(runs: Runs) -> None:
    worst = _worst(_from_traces(runs[0] / "layers"))
    assert worst.cause is Cause.LAYERS
    assert worst.where.startswith("blocks.1 ")
    assert worst.ranks == ()
    assert worst.seconds == pytest.approx(3 * MORE, rel=0.2)


def test_a_log_tells_slow_layers_by_their_forward_passes(runs: Runs) -> None:
    found = _from_log(runs[0] / "layers").findings
    layers = [one for one in found if one.cause is Cause.LAYERS]
    ahead = next(one for one in layers if one.where.startswith("forward of blocks.1 "))
    back = next(one for one in layers if one.where.startswith("backward of all"))
    assert ahead.seconds == pytest.approx(MORE, rel=0.2)
    assert back.seconds == pytest.approx(2 * MORE, rel=0.2)


@HOW
def test_a_slow_rank_is_named(runs: Runs, read: Diagnose) -> None:
    worst = _worst(read(runs[0] / "rank"))
    assert (worst.cause, worst.ranks) == (Cause.RANK, (1,))
    assert worst.seconds == pytest.approx(BLOCKS * 1.5 * MORE, rel=0.2)


@HOW
def test_slow_layers_of_one_rank_are_told_from_a_slow_rank(runs: Runs, read: Diagnose) -> None:
    worst = _worst(read(runs[0] / "layers of a rank"))
    assert (worst.cause, worst.ranks) == (Cause.LAYERS, (1,))
    assert "blocks.2" in worst.where
    assert worst.seconds == pytest.approx(3 * MORE, rel=0.2)


@HOW
def test_a_slow_optimizer_is_named(runs: Runs, read: Diagnose) -> None:
    worst = _worst(read(runs[0] / "optimizer"))
    assert worst.cause is Cause.OPTIMIZER
    assert worst.seconds == pytest.approx(3 * MORE, rel=0.2)


@HOW
def test_slow_messages_are_named(runs: Runs, read: Diagnose) -> None:
    folder, seconds = runs
    worst = _worst(read(folder / "collective"))
    assert worst.cause is Cause.COLLECTIVE
    assert "sums of gradients" in worst.where
    assert "groups of 2" in worst.where
    assert worst.seconds == pytest.approx(seconds["collective"] - seconds["nothing"], rel=0.2)


def test_the_profile_is_corrected_by_what_was_seen(runs: Runs) -> None:
    for name in ("layers", "collective"):
        source = open_source(runs[0] / name)
        known = find_profile(source)
        made, said = updated(known, source)
        found = diagnose(source, made)
        assert said
        assert made.origin.kind is OriginKind.MEASURED
        assert name in made.origin.source
        assert found.predicted == pytest.approx(found.seconds, rel=0.2)


def test_slow_layers_of_a_stage_are_named_and_waiting_for_them_is_not(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, plant_in_a_stage, timeout=600.0, folder=str(tmp_path))
    worst = _worst(_from_traces(tmp_path / "stage"))
    assert (worst.cause, worst.stage) == (Cause.LAYERS, 1)
    assert worst.where.startswith("blocks.3 ")
    assert worst.seconds == pytest.approx(4 * 3 * MORE, rel=0.2)
    logged = [one for one in _from_log(tmp_path / "stage").findings if one.cause is Cause.LAYERS and one.stage == 1]
    assert {one.where.split(" (")[0] for one in logged[:2]} == {"backward of all layers", "forward of blocks.3"}
    assert sum(one.seconds for one in logged[:2]) == pytest.approx(4 * 3 * MORE, rel=0.2)
