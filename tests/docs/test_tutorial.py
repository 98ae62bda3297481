"""docs/tutorial.md and docs/for-users-of.md: commands print what is shown, and the tutorial trains like one process."""

from __future__ import annotations

import difflib
import io
import os
import re
import runpy
from contextlib import chdir, redirect_stdout
from pathlib import Path

import pytest

from galvatron_lite.launch.commands import PLAN_VARIABLE
from tests.docs.pages import ROOT, blocks, text_of
from tests.docs.place import galvatron
from tests.docs.test_branches_page import missing
from tests.pool import WorkerPool

TUTORIAL, USERS = text_of("docs/tutorial.md"), text_of("docs/for-users-of.md")
EXAMPLES = ROOT / "scripts" / "examples"
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
    one = (EXAMPLES / "nanogpt.py").read_text(encoding="utf-8").replace("range(101)", f"range({STEPS})")
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
    one, many = ((EXAMPLES / way / f"{name}.py").read_text(encoding="utf-8") for way in ("one", "many"))
    (edit,) = blocks(USERS, f"diff scripts/examples/{name}.py")
    assert changed(edit) == changes(one, many)
