"""The examples: the same script for one process and for many, at most five lines apart, with the same losses."""

from __future__ import annotations

import difflib
import io
import os
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from galvatron_lite.launch.commands import PLAN_VARIABLE
from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.plans.io import write_plan
from galvatron_lite.plans.schema import PLAN_VERSION, LayerRun, Plan, Schedule, Stage
from tests.pool import WorkerPool

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
NAMES = sorted(path.stem for path in (EXAMPLES / "one").glob("*.py"))


def layers() -> list[str]:
    return ["before", "model.layers.0", "model.layers.1", "after"]


def plans() -> dict[str, Plan]:
    """Shards and shares in micro-batches, and a pipeline."""
    first, second = Strategy(zero=2, zero_stage=3), Strategy(tensor=2)
    mixed = [first, second, first, first]
    one = Stage(tuple(LayerRun(name, name, 1, each) for name, each in zip(layers(), mixed, strict=True)))
    two = [Stage(tuple(LayerRun(name, name, 1, Strategy()) for name in half)) for half in (layers()[:2], layers()[2:])]
    schedule = Schedule.ONE_F_ONE_B
    return {
        "mixed": Plan(PLAN_VERSION, "llama", 2, 8, 2, schedule, "fp32", (one,)),
        "pipeline": Plan(PLAN_VERSION, "llama", 2, 8, 4, schedule, "fp32", tuple(two)),
    }


def losses_of(script: str, plan: str = "") -> list[float]:
    """What a script prints, run as it is by this process."""
    if plan:
        os.environ[PLAN_VARIABLE] = plan
    sys.argv = [script]
    with redirect_stdout(io.StringIO()) as said:
        runpy.run_path(script, run_name="__main__")
    return [float(line.split()[-1]) for line in said.getvalue().splitlines() if line.startswith("loss ")]


def in_turn(script: str, plans: list[str]) -> list[list[float]]:
    """The same script under several plans; run on every rank of a world."""
    before = dict(os.environ)
    found = []
    for plan in plans:
        os.environ.update(before)
        found.append(losses_of(script, plan))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_five_lines_apart(name: str) -> None:
    one, many = ((EXAMPLES / way / f"{name}.py").read_text().splitlines() for way in ("one", "many"))
    changed = [line for line in difflib.ndiff(one, many) if line.startswith("+ ") and line[2:].strip()]
    lost = [line for line in difflib.ndiff(one, many) if line.startswith("- ") and line[2:].strip()]
    assert 0 < max(len(changed), len(lost)) <= 5, changed


@pytest.mark.parametrize("name", NAMES)
def test_same_losses(pool: WorkerPool, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = []
    for kind, plan in plans().items():
        write_plan(plan, tmp_path / f"{kind}.yaml")
        files.append(str(tmp_path / f"{kind}.yaml"))
    alone = pool.run(1, losses_of, script=str(EXAMPLES / "one" / f"{name}.py"))[0]
    assert len(alone) == 6
    for found in pool.run(2, in_turn, script=str(EXAMPLES / "many" / f"{name}.py"), plans=files):
        assert found == [pytest.approx(alone, rel=1e-4)] * 2
