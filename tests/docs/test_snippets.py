"""Code that the pages show runs as it stands, in a world of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from galvatron_lite import auto_parallelize
from galvatron_lite.api import plan_phases
from galvatron_lite.plans.phases import Phase, write_phased_plan

from .branch_page import run_page
from .pages import PAGES, ROOT, blocks, named
from .place import galvatron, place_of

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
CYCLIC, EXAMPLES = "tests/docs/test_pages_run.py", "tests/frameworks/test_examples.py"
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
    "docs/branches.md": "tests/docs/test_pages_run.py",
    "docs/first-plan.md": "tests/docs/place.py",
}
"""Pages whose code is files, which these run."""


def test_every_page_with_code_is_listed() -> None:
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
