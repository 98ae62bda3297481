"""The examples: the same script for one process and for many, at most five lines apart, with the same losses."""

from __future__ import annotations

import difflib
import io
import os
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from galvatron_lite.launch.commands import PLAN_VARIABLE
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import write_plan
from galvatron_lite.plans.schema import Plan
from tests.docs.pages import blocks, text_of
from tests.pool import WorkerPool
from tests.runtime.plans import make_plan

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
NAMES = sorted(path.stem for path in (EXAMPLES / "one").glob("*.py"))


def plans() -> dict[str, Plan]:
    """Shards and shares in micro-batches, and a pipeline."""
    names, zero = ["before", "model.layers.0", "model.layers.1", "after"], Strategy(zero=2, zero_stage=3)
    return {
        "mixed": make_plan([names], [[zero, Strategy(tensor=2), zero, zero]], 8, 2),
        "pipeline": make_plan([names[:2], names[2:]], [[Strategy()] * 2] * 2, 8, 4),
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
    """The same script under several plans, and what the page shows of it; run on every rank of a world."""
    before = dict(os.environ)
    found = []
    for plan in plans:
        os.environ.update(before)
        found.append(losses_of(script, plan))
    os.environ.update(before)
    return [*found, *([[page_loss(script)]] if script.endswith("trainer.py") else [])]


def page_loss(script: str, alone: bool = False) -> float:
    """The mean loss of the page's training with the Trainer, with the model and data of the example.

    Args:
        script: the example, whose own training has been tried.
        alone: whether the lines that make it many processes' are left out, with transformers' own Trainer.
    """
    sys.argv = [script]
    made = Path(script).read_text(encoding="utf-8").split("args = ")[0]
    code = blocks(text_of("docs/training-loops.md"), "python")[0]
    if alone:
        code = re.sub(r"^(from galvatron_lite|as_one_process).*\n", "", code, flags=re.MULTILINE)
        code = code.replace("auto_parallelize(model, global_batch=8)", "model")
        made = made.replace("import LlamaConfig", "import Trainer, LlamaConfig")
    names: dict[str, Any] = {}
    exec(made, names)
    assert ("auto_parallelize" in code) != alone
    with redirect_stdout(io.StringIO()):
        exec(code, names)
    return float(names["trainer"].state.log_history[-1]["train_loss"])


def of_the_page(script: str) -> list[float]:
    """The losses of an example in one process, then, of the Trainer's, that of the page."""
    losses = losses_of(script)
    return [*losses, *([page_loss(script, alone=True)] if script.endswith("trainer.py") else [])]


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_differ_in_five_lines(name: str) -> None:
    one, many = ((EXAMPLES / way / f"{name}.py").read_text().splitlines() for way in ("one", "many"))
    changed = [line for line in difflib.ndiff(one, many) if line.startswith("+ ") and line[2:].strip()]
    lost = [line for line in difflib.ndiff(one, many) if line.startswith("- ") and line[2:].strip()]
    assert 0 < max(len(changed), len(lost)) <= 5, changed


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_have_the_same_losses(
    pool: WorkerPool, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "lightning":
        pytest.importorskip("pytorch_lightning")
    monkeypatch.chdir(tmp_path)
    files = []
    for kind, plan in list(plans().items())[: 2 if name == NAMES[-1] else 1]:  # what a stage is, no loop knows
        write_plan(plan, tmp_path / f"{kind}.yaml")
        files.append(str(tmp_path / f"{kind}.yaml"))
    alone = pool.run(1, of_the_page, script=str(EXAMPLES / "one" / f"{name}.py"))[0]
    steps, page = alone[:6], alone[6:]
    assert len(steps) == 6
    expected = [pytest.approx(steps, rel=1e-4)] * len(files) + [pytest.approx(page, rel=1e-4)] * bool(page)
    for found in pool.run(2, in_turn, script=str(EXAMPLES / "many" / f"{name}.py"), plans=files):
        assert found == expected
