"""What the pages say of the code, against the code."""

import ast
import re
from dataclasses import fields

import pytest

from galvatron_lite.cli.accuracy import _GROUPINGS
from galvatron_lite.cluster.collectives import TREE_EFFICIENCY
from galvatron_lite.cost.memory import UNUSED_SHARE
from galvatron_lite.parallelism.pipeline.schedule import DELAYED_SCHEDULE, schedules
from galvatron_lite.plans.schema import MemoryBreakdown, TimeBreakdown
from galvatron_lite.profiler import machine as constants
from galvatron_lite.validate.checks import FRAMEWORKS
from galvatron_lite.validate.report import unscored, worst_data
from galvatron_lite.validate.results import MeasuredRun, Predicted, ScoredRun, Scores, SkipError, judge
from galvatron_lite.validate.rows import INTEGERS, REALS
from studies.calibration.fit import ENOUGH

from ..validate.runs import GPT
from .pages import ROOT, script_source, text_of

COSTS, VALIDATE = text_of("docs/costs.md") + text_of("docs/limits.md"), text_of("docs/validate.md")
PACKAGE = ROOT / "galvatron_lite"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("1.7 to 3.4 times", f"{min(constants.MISALIGNED.values())} to {max(constants.MISALIGNED.values())} times"),
        ("cheapest of six tile sizes", {6: "cheapest of six tile sizes"}.get(len(constants.GPU_TILES))),
        ("waves of 128 query", f"waves of {constants.ATTENTION_BLOCK} query"),
        ("2.5 times the FLOPs", f"{constants.ATTENTION_BACKWARD_FLOPS} times the FLOPs"),
        ("backward ones at 0.7", f"backward ones at {constants.BACKWARD_HOST}"),
        ("a blocking collective as two", {2.0: "a blocking collective as two"}.get(constants.COLLECTIVE_LAUNCHES)),
        ("sqrt(device² + host²)", {2.0: "sqrt(device² + host²)"}.get(constants.QUEUE)),
        ("a factor of 1.13 each", f"a factor of {constants.NVIDIA_OVERLAP.compute_slowdown:.2f} each"),
        ("fused AdamW 28", f"fused AdamW {constants.OPTIMIZERS['adamw-fused'].moved}"),
        ("default one of PyTorch 80", f"default one of PyTorch {constants.OPTIMIZERS['adamw'].moved}"),
        ("2·S/(0.92 β)", f"2·S/({TREE_EFFICIENCY} β)"),
        ("15 % of reserved memory", f"{100 * UNUSED_SHARE:.0f} % of reserved memory"),
    ],
)
def test_constants_on_the_page_are_those_of_the_code(words: str, value: str | None) -> None:
    assert words == value
    assert words in " ".join(COSTS.split())


def reasons() -> set[str]:
    """Reasons for which rows are skipped, up to what depends on the row: the first argument of every ``SkipError``."""
    found: set[str] = set()
    for path in (PACKAGE / "validate").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "SkipError":
                first = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
                found |= {first.value.strip(" :")} if isinstance(first, ast.Constant) else set()
    return found


def test_every_reason_is_explained() -> None:
    told = " ".join(VALIDATE.split())
    known = reasons()
    assert len(known) > 10
    # What breaks is a mistake of ours; the tests say that there is none.
    missing = [reason for reason in known if reason.partition(":")[0] not in told and reason not in OURS]
    assert not missing


OURS = {"internal error", "no model named"}


def test_the_fields_of_the_scores_are_listed() -> None:
    block = next(text for text in VALIDATE.split("```") if '"families"' in text)
    listed = set(re.findall(r'"(\w+)"', block)) - {"families", "macro", "macro_language", "macro_mixtures", "worst"}
    assert listed == {item.name for item in fields(Scores)}


def test_the_fields_of_the_entries_are_listed() -> None:
    block = next(text for text in VALIDATE.split("```") if text.lstrip().startswith('{"unscored"'))
    outcome = Predicted(1.0, 1, 1, 2, TimeBreakdown(), MemoryBreakdown())
    one = judge(GPT, MeasuredRun(2.0, 1), outcome)
    skipped = ScoredRun(GPT, None, SkipError("GPU not stated"))
    assert {*worst_data(one), *unscored([skipped])[0], "unscored", "notes", "worst"} == set(
        re.findall(r'"(\w+)"', block)
    )


def test_ranges_of_fields_are_those_that_are_read() -> None:
    found: dict[str, str] = {}
    for names, said in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ((?:\d+|up) to [\d,]+) \|$", VALIDATE, re.MULTILINE):
        found |= dict.fromkeys(re.findall(r"\w+", names), said)
    whole = {name: f"{least} to {largest:,}" for name, (least, largest) in INTEGERS.items()}
    assert found == whole | {name: f"up to {largest:,.0f}" for name, largest in REALS.items()}


def test_known_frameworks_are_listed() -> None:
    told = " ".join(VALIDATE.split())
    assert f"Known are {', '.join(FRAMEWORKS[:-1])} and {FRAMEWORKS[-1]};" in told


def test_groupings_and_schedules_are_listed() -> None:
    row = next(line for line in VALIDATE.splitlines() if line.startswith("| `--by`"))
    assert set(re.findall(r"`(\w+)`", row)) == set(_GROUPINGS)
    for schedule in set(schedules()) - {DELAYED_SCHEDULE}:  # of which no run was published
        assert str(schedule).removeprefix("interleaved-") in VALIDATE


def test_the_calibration_page_names_what_the_script_takes() -> None:
    script = script_source("calibrate")
    page = text_of("docs/calibrate.md").partition("## Refit")[2]
    for option in set(re.findall(r"`?(--[a-z-]+)", page)) - {"--calibration", "--worst"}:
        assert f'"{option}"' in script, option
    assert 0 < ENOUGH < 0.1


def test_constants_that_are_named_exist() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    names = set(re.findall(r"`(_?[A-Z]{4}[A-Z_]*)`", COSTS))
    assert len(names) > 5
    for name in names:
        assert re.search(rf"^{name}\b.*=", sources, re.MULTILINE), name


def test_no_page_is_long() -> None:
    """Ten minutes are some 2,500 words, tables and code apart; nobody reads the reference from start to end."""
    for page in set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "api.md"}:  # written on demand
        text = re.sub(r"^(\||    |<!--).*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert len(text.split()) < 2500, page
