"""The pages' code runs; so does the tutorial."""

from __future__ import annotations

import difflib
import io
import os
import re
import runpy
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from galvatron_lite import auto_parallelize
from galvatron_lite.api import plan_phases
from galvatron_lite.launch.commands import PLAN_VARIABLE
from galvatron_lite.plans.phases import Phase, write_phased_plan
from tests.docs.branch_page import run_page
from tests.docs.pages import PAGES, ROOT, blocks, named, text_of
from tests.docs.place import galvatron, place_of
from tests.docs.test_branches_page import missing
from tests.pool import WorkerPool

Names = dict[str, Any]
SHOWN = {named(page): found for page in PAGES if (found := blocks(page.read_text(encoding="utf-8"), "python"))}


@dataclass(frozen=True, slots=True)
class Told:
    """How a block is run: by what it is preceded, what stands for what, and what is true after it."""

    true: str
    first: Callable[[Names], None] = lambda names: None
    instead: tuple[tuple[str, str], ...] = ()
    why: str = ""


def model_of(names: Names) -> None:
    """The first page's model and batches, under the names that the pages give them."""
    script = run_page(Path(), "train.py")
    model, batch = script["make_model"]()
    names |= {"model": model, "batch": batch, "first_batch": batch, "example_batch": batch, "batches": [batch] * 3}
    names |= {"MyModel": script["Model"], "steps": 4, "every": 2, "batch_of": lambda step: script["make_batch"]()}
    names |= {"torch": torch, "auto_parallelize": auto_parallelize}
    names["loader"] = lambda samples, sequence: script["make_batch"](samples)


def parallel_of(names: Names) -> None:
    """And as it is after ``auto_parallelize``."""
    model_of(names)
    names["parallel"] = auto_parallelize(names["model"], names["batch"], plan="plan.yaml", device="cpu")
    names["optimizer"] = names["parallel"].optimizer(torch.optim.AdamW, lr=1e-3)


def resumed(names: Names) -> None:
    """Training that goes on where the folder's has ended."""
    model_of(names)
    names["steps"] = 8


def phased(names: Names) -> None:
    model_of(names)
    found = plan_phases([Phase("a", 2, 8), Phase("b", 2, 16)], next(Path("profiles").glob("CPU-*/Model.yaml")))
    write_phased_plan(found, Path("phased.yaml"))


def two_plans(names: Names) -> None:
    model_of(names)
    galvatron("plan --batch 16 -o first.yaml")
    galvatron("plan --batch 16 --fix microbatches=2 -o second.yaml")


def plain(names: Names) -> None:
    """A model of its own, not split, and its optimizer; the checkpoint's."""
    model_of(names)
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), lr=1e-3)


def exported(names: Names) -> None:
    galvatron("checkpoint export checkpoints/step-100 weights")
    parallel_of(names)


def scheduled(names: Names) -> None:
    model_of(names)
    names["make_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)


def views_of(names: Names) -> None:
    names["views"], names["targets"] = torch.randn(1, 4, 36, 36), torch.zeros(1, 1, 36, 36)


TRAINED = "bool(torch.isfinite(loss))"
CYCLIC, EXAMPLES = "tests/docs/test_branches_page.py", "tests/frameworks/test_examples.py"
RUN: dict[str, tuple[Told | str, ...]] = {
    "docs/adapting.md": (Told("parallel.step == 4", phased), Told("parallel.step == 0", model_of)),
    "docs/checkpoints.md": (
        Told("(parallel.step, len(list(Path('checkpoints').glob('step-*')))) == (8, 3)", resumed),
        Told("all(p.isfinite().all() for p in model.parameters())", plain),
        Told("bool(parallel.full_state_dict())", exported),
    ),
    "docs/cnn.md": (
        Told("bool(loss.isfinite()) and len(segmented) == len(rebuilt) == 1", views_of,
             (('"perception"', '"perception-mini"'),), "74 M parameters, 450 GFLOPs"),
    ),
    "docs/cyclic.md": (
        Told("parallel.plan.cyclic.rule == 'cdp-v2' and all(p.isfinite().all() for p in weights.values())", scheduled),
        Told(TRAINED), CYCLIC, CYCLIC,
    ),
    "docs/deepspeed.md": ("tests/runtime/deepspeed/test_engine.py",),
    "docs/plan.md": (Told("len(front.points) > 1"),),
    "docs/switching.md": (Told("parallel.plan.microbatches == 2", two_plans),),
    "docs/training-loops.md": (
        EXAMPLES, Told(TRAINED + " and all(p.grad is None for p in parallel.parameters())", parallel_of),
    ),
    "docs/watch.md": (Told("Path('runs/first').is_dir()", model_of, (("runs/first", "runs/second"),), "made already"),),
    "README.md": (
        Told(f"{TRAINED} and Path('checkpoints/step-100').is_dir()", model_of, (('mem="40GB"', 'mem="1GB"'),), "less"),
    ),
}  # fmt: skip
"""How each block of a page is run, in their order and with what those before have made; or the test that runs it, as it
takes several processes, or is part of what that test does."""

ELSEWHERE = {
    "docs/branches.md": "tests/docs/test_branches_page.py",
    "docs/first-plan.md": "tests/docs/place.py",
}
"""Pages whose code is files, which these run."""


def test_every_page_with_code_is_told_of() -> None:
    assert {*RUN, *ELSEWHERE} == set(SHOWN)
    tests = [(page, test) for page, parts in RUN.items() for test in parts if isinstance(test, str)]
    assert all(page in (ROOT / test).read_text(encoding="utf-8") for page, test in (*ELSEWHERE.items(), *tests))
    assert all(len(SHOWN[page]) == len(parts) for page, parts in RUN.items())


@pytest.mark.parametrize(
    "page", [page for page, parts in RUN.items() if not all(isinstance(one, str) for one in parts)]
)
def test_code_runs(page: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place_of(page, made, tmp_path))
    names: Names = {"Path": Path}
    for code, told in zip(SHOWN[page], RUN[page], strict=True):
        if isinstance(told, str):
            continue
        told.first(names)
        for words, others in told.instead:
            assert words in code
            code = code.replace(words, others)
        exec(code, names)
        assert eval(told.true, names), told.true


TUTORIAL, USERS = text_of("docs/tutorial.md"), text_of("docs/for-users-of.md")
LOOPS = ROOT / "scripts" / "examples"
STEPS = 21
"""Of the tutorial's 101: two lines of its output."""


def shown(page: str) -> list[tuple[str, list[str]]]:
    """Commands at a prompt, and the lines below each."""
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return [(block.splitlines()[0][2:], block.splitlines()[1:]) for block in fenced if block[0] == "$"]


def changed(diff: str) -> list[str]:
    """Lines of a diff that are taken out or put in."""
    return [line for line in diff.splitlines() if line[:1] in "+-" and line[1:2] not in "+-"]


def changes(one: str, many: str) -> list[str]:
    return [
        line for line in changed("\n".join(difflib.unified_diff(one.splitlines(), many.splitlines(), n=0))) if line[1:]
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tutorial's folder, with its script before the change and after it."""
    folder = tmp_path_factory.mktemp("tutorial")
    one = (LOOPS / "nanogpt.py").read_text(encoding="utf-8").replace("range(101)", f"range({STEPS})")
    (edit,) = blocks(TUTORIAL, "diff train.py")
    imported, split, removed, optimizer = changed(edit)
    many = one.replace("\n\n\n@dataclass", f"\n\n{imported[1:]}\n\n\n@dataclass", 1)
    many = many.replace(removed[1:], f"{split[1:]}\n{optimizer[1:]}")
    assert sorted(changes(one, many)) == sorted(changed(edit))
    (folder / "one.py").write_text(one)
    (folder / "train.py").write_text(many)
    return folder


@pytest.mark.parametrize("command", [words for words, _ in shown(TUTORIAL) if "--cluster" in words])
def test_the_tutorial_plans_as_it_shows(place: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(place)
    printed = galvatron(command).splitlines()
    assert missing(dict(shown(TUTORIAL))[command], printed) == [], printed


def losses(script: Path, plan: str = "") -> dict[int, float]:
    """Losses that the script prints in this process, by step, under a plan if one is given."""
    os.environ |= {PLAN_VARIABLE: plan} if plan else {}
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(script), run_name="__main__")
    return losses_of(out.getvalue())


def losses_of(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss (\S+)$", text, re.MULTILINE)}


def test_every_step_is_shown() -> None:
    assert [len(shown(page)) for page in (TUTORIAL, USERS)] == [6, 4]


def test_the_tutorial_trains_on_two_processes_like_one(place: Path, pool: WorkerPool) -> None:
    pages = [found for _, lines in shown(TUTORIAL) if (found := losses_of("\n".join(lines)))]
    (table,) = (lines for words, lines in shown(TUTORIAL) if words.endswith("-o two.yaml"))
    with chdir(place):
        # What is measured differs from machine to machine, so the shown plan is pinned.
        pinned = "--cluster t4 --gpus 2 --precision fp32 --batch 16 --fix pp=2 --fix microbatches=16 --schedule zb-1p"
        printed = galvatron(f"galvatron plan --model train.py:make_model {pinned} -o two.yaml").splitlines()
    assert missing([line for line in table if re.match(r"\d? +\w", line)], printed) == [], printed
    alone = pool.run(1, losses, script=place / "one.py")[0]
    both = pool.run(2, losses, script=place / "train.py", plan=str(place / "two.yaml"), timeout=120)
    assert set(alone) == {0, 20}
    assert both == [pytest.approx(alone, abs=2e-4), {}]  # Rank 0 prints four decimals.
    assert len(pages) == 2
    for page in pages:
        assert set(page) == set(range(0, 101, 20))
        assert {step: page[step] for step in alone} == pytest.approx(alone, abs=2e-3)


@pytest.mark.parametrize("command", [words for words, _ in shown(USERS)])
def test_settings_of_other_trainers_are_as_shown(tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    printed = galvatron(command).splitlines()
    assert missing(dict(shown(USERS))[command], printed) == [], printed
    written = command.split()[-1]
    settings = blocks(USERS, f"text {re.escape(written)}")
    assert settings == ([] if written == "accelerate.yaml" else [(tmp_path / written).read_text().rstrip() + "\n"])


@pytest.mark.parametrize("name", ["with_accelerate", "lightning"])
def test_the_lines_that_change_are_those_of_the_examples(name: str) -> None:
    one, many = ((LOOPS / way / f"{name}.py").read_text(encoding="utf-8") for way in ("one", "many"))
    (edit,) = blocks(USERS, f"diff scripts/examples/{name}.py")
    assert changed(edit) == changes(one, many)
