"""Pages whose commands and code all run, and print what is shown; what they train equals one process."""

from __future__ import annotations

import ast
import difflib
import inspect
import io
import json
import os
import re
import runpy
import shlex
import shutil
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from galvatron_lite import auto_parallelize
from galvatron_lite.cli import app
from galvatron_lite.diagnose.findings import Cause
from galvatron_lite.launch.commands import PLAN_VARIABLE
from galvatron_lite.plans.io import write_plan
from galvatron_lite.profiler.store import read_profile, write_profile
from galvatron_lite.runs.schema import RankRecord, RunHeader, StepPart
from galvatron_lite.runtime.cyclic.model import CyclicModel
from galvatron_lite.world import join
from tests.diagnose.test_planted import known_profile, plan_of
from tests.docs.branch_page import run_page, train
from tests.docs.pages import ROOT, blocks, commands, text_of
from tests.docs.place import galvatron
from tests.parallelism.cyclic.models import blocks_case, make_batches, make_plan
from tests.pool import WorkerPool
from tests.runs.lines import a_rank_header, write

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


BRANCHES = text_of("docs/branches.md")
BLOCKS = [match[1] for match in re.finditer(r"^```\w*\n(.*?)^```", BRANCHES, re.DOTALL | re.MULTILINE)]
FILES = {match[1]: block for block in BLOCKS if (match := re.match(r"# (\S+\.\w+)\n", block))}
SHOWN = [block.removeprefix("$ ").splitlines() for block in BLOCKS if block.startswith("$ ")]
NUMBER = re.compile(r"\d[\d.,]*")
CLOSE = 0.1
"""Shown figures may be off by that share: constants of the estimates are refined; words may not."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files, and those that its commands write."""
    place = tmp_path_factory.mktemp("branches")
    for name, text in FILES.items():
        (place / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("COLUMNS", "200")
        for command, *lines in SHOWN:
            done = CliRunner().invoke(app, shlex.split(command)[1:])
            assert done.exit_code == 0, done.output
            assert not missing(lines, done.output.splitlines()), done.output
    return place


def missing(wanted: list[str], printed: list[str]) -> list[str]:
    """Lines that are not printed, in their order."""
    rest = iter(printed)
    return [line for line in wanted if line != "…" and not any(alike(line, other) for other in rest)]


def alike(shown: str, printed: str) -> bool:
    """Whether two lines have the same words, and nearly the same numbers."""
    left, right = (" ".join(line.split()) for line in (shown, printed))
    if NUMBER.sub("#", left) != NUMBER.sub("#", right):
        return False
    pairs = zip(NUMBER.findall(left), NUMBER.findall(right), strict=True)
    return all(value(one) == pytest.approx(value(other), rel=CLOSE) for one, other in pairs)


def value(text: str) -> float:
    return float(text.replace(",", "").rstrip("."))


def test_lines_are_compared() -> None:
    assert alike("a  1.5 ms, x", "a 1.55 ms, x")
    assert not alike("a 1.5 ms", "a 2.5 ms")
    assert not alike("a 1.5 ms", "a 1.5 us")
    assert missing(["a", "…", "c"], ["a", "b", "d"]) == ["c"]


def test_the_page_on_branches_has_its_parts() -> None:
    assert set(FILES) == {"towers.py", "look.py", "hand.yaml", "train.py"}
    assert len(SHOWN) == 5


def test_branches_are_seen_from_python(folder: Path) -> None:
    assert run_page(folder, "look.py")["found"] == [("user", ("user",)), ("item", ("item",))]


def test_branches_train_like_one_process(folder: Path, pool: WorkerPool) -> None:
    losses, state = alone(folder)
    for found, own in pool.run(2, train, folder=folder, timeout=60):
        assert found == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(own, state, rtol=1e-4, atol=1e-5)


def alone(folder: Path) -> tuple[list[float], dict[str, Any]]:
    """The page's training, by torch alone."""
    model, batch = run_page(folder, "towers.py")["make_model"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


PROFILE = "profiles/CPU-AMD-EPYC-x2-5bce98/quickstart-profile.yaml"


def test_the_page_on_explaining_shows_what_its_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "118")
    page = text_of("docs/explain.md")
    (tmp_path / PROFILE).parent.mkdir(parents=True)
    shutil.copy(ROOT / PROFILE, tmp_path / PROFILE)
    (tmp_path / "hand.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    printed = ""
    for words in (words for words in commands(page) if words.startswith("galvatron ") and ".yaml" in words):
        done = CliRunner().invoke(app, shlex.split(words)[1:])
        assert done.exit_code == 0, done.output
        printed += done.output
    lines = {line.rstrip() for line in printed.splitlines()}
    shown = [
        line for block in re.findall(r"^```\n(.*?)^```", page, re.DOTALL | re.MULTILINE) for line in block.splitlines()
    ]
    assert len(shown) > 60
    assert [line for line in shown if line.rstrip() not in lines] == []


WATCHED = text_of("docs/watch.md")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run whose optimizer is slow, and a trace of somebody else's."""
    folder = tmp_path_factory.mktemp("watched")
    profile = known_profile()
    plan = plan_of(profile)
    write(folder / "runs/first", "steps-00001.jsonl", [RunHeader(1, plan, "abc", 1000.0)])
    parts = {StepPart.FORWARD: 0.041, StepPart.BACKWARD: 0.083, StepPart.OPTIMIZER: 0.2, StepPart.OTHER: 0.005}
    for rank in range(2):
        record = RankRecord(rank, 9, 9, sum(parts.values()), parts=parts)
        write(folder / "runs/first", f"rank-0000{rank}-00001.jsonl", [a_rank_header(rank), record])
    write_profile(profile, folder / "runs/first/profile.yaml")
    write_profile(profile, folder / "profile.yaml")
    write_plan(plan, folder / "plan.yaml")
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "tid": 1, "ts": 0, "dur": 9e5}
    (folder / "trace.json").write_text(json.dumps({"traceEvents": [event]}))
    return folder


def test_commands_of_the_page_on_watching_run(watched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(watched)
    found = [words for words in commands(WATCHED) if words.startswith("galvatron diagnose ")]
    assert len(found) >= 4
    for words in found:
        done = CliRunner().invoke(app, shlex.split(words.replace(".json.gz", ".json"))[1:])
        assert done.exit_code == 0, done.output
        assert "optimizer" in done.output or "trace.json" in words
        if "--json" in words:
            assert json.loads(done.output)["findings"][0]["cause"] == "optimizer"
    made = read_profile(watched / "corrected.yaml")
    ratio = made.optimizer.seconds_per_item / read_profile(watched / "profile.yaml").optimizer.seconds_per_item
    assert ratio > 50
    assert made.origin.source.endswith("corrected by run runs/first")


def test_code_and_words_are_those_of_the_package() -> None:
    call = ast.parse(WATCHED.split("```python\n")[1].split("```")[0]).body[0]
    assert isinstance(call, ast.Assign)
    assert isinstance(call.value, ast.Call)
    options = {keyword.arg for keyword in call.value.keywords}
    assert options == {"log", "live", "profile_steps"}
    assert options <= set(inspect.signature(auto_parallelize).parameters)
    assert all(f"`{cause.value}`" in WATCHED for cause in Cause)
    assert (ROOT / "docs/watch.md").is_file()


CYCLIC_STEPS, EVERY = 8, 3


def codes() -> list[str]:
    """The Python of the section."""
    section = text_of("docs/cyclic.md").split("## How do I save and resume?")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


class StoppedError(Exception):
    pass


def model_of(rule: str) -> CyclicModel:
    torch.manual_seed(0)
    model, layers, stages = blocks_case(3)
    return CyclicModel(model, make_plan(stages, rule, "single"), layers)


def run(code: str, parallel: CyclicModel, stop: int = CYCLIC_STEPS) -> dict[str, Any]:
    """Run it; it is stopped before a training step."""
    torch.manual_seed(1)
    batches = make_batches(CYCLIC_STEPS, 3)

    def batch_of(step: int) -> dict[str, Tensor]:
        if step == stop:
            raise StoppedError
        return batches[step]

    names: dict[str, Any] = {
        "torch": torch, "parallel": parallel, "steps": CYCLIC_STEPS, "every": EVERY, "batch_of": batch_of,
    }  # fmt: skip
    exec(code, names)
    return names


def test_cyclic_runs_resume_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    join(torch.device("cpu"))
    training, _ = codes()
    for name in ("stopped", "whole"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "stopped")
    with pytest.raises(StoppedError):
        run(training, model_of("cdp-v2"), stop=7)
    assert sorted(path.name for path in Path("checkpoints").iterdir()) == ["step-3", "step-6"]
    resumed = run(training, model_of("cdp-v2"))["weights"]
    monkeypatch.chdir(tmp_path / "whole")
    whole = run(training, model_of("cdp-v2"))["weights"]
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())


def test_cyclic_runs_go_on_under_another_rule_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    join(torch.device("cpu"))
    training, other_rule = codes()
    monkeypatch.chdir(tmp_path)
    trained = run(training, model_of("cdp-v2"), stop=CYCLIC_STEPS + 1)["weights"]
    saved = model_of("cdp-v2")
    saved.load_full_state_dict(trained)
    saved.save("checkpoints/step-100")
    other = model_of("cdp-v1")
    run(other_rule, other)
    after = other.full_state_dict()
    assert all(torch.equal(value, after[name]) for name, value in trained.items())


def test_the_errors_are_as_printed() -> None:
    """What the page shows of errors is in the code that raises them."""
    sources = "".join(
        text_of(f"galvatron_lite/{name}.py").replace("\n", " ")
        for name in ("parallelism/cyclic/mailbox", "folders", "runtime/checkpoint/manifest")
    )
    for said in (
        "Training has stopped. Start all processes again and resume from the last checkpoint (load_latest).",
        "waited in vain for {} from", "which is gone or was silent for", "gradients of activations",
        "The checkpoint is damaged: delete it and resume from the one before, which load_latest(folder) finds.",
        "It holds {size} of {expected.bytes} bytes.",
    ):  # fmt: skip
        assert said in sources
