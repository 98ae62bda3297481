"""Claims of the pages, and every kind of error."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields

import pytest

from galvatron_lite import errors
from galvatron_lite.api import plan
from galvatron_lite.cli.accuracy import _GROUPINGS
from galvatron_lite.cluster.collectives import TREE_EFFICIENCY
from galvatron_lite.cost.memory import UNUSED_SHARE
from galvatron_lite.parallelism.pipeline.schedule import DELAYED_SCHEDULE, schedules
from galvatron_lite.plans.schema import MemoryBreakdown, TimeBreakdown
from galvatron_lite.profiler import machine as constants
from galvatron_lite.validate.checks import FRAMEWORKS
from galvatron_lite.validate.report import unscored, worst_data
from galvatron_lite.validate.results import MeasuredRun, Predicted, ScoredRun, Scores, Skipped, judge
from galvatron_lite.validate.rows import REAL, WHOLE
from studies.calibration.fit import ENOUGH
from tests.docs.pages import ROOT, script_source, text_of

from ..validate.runs import GPT

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
    """Reasons for which rows are skipped, up to what depends on the row: the first argument of every ``Skipped``."""
    found: set[str] = set()
    for path in (PACKAGE / "validate").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Skipped":
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
    skipped = ScoredRun(GPT, None, Skipped("GPU not stated"))
    assert {*worst_data(one), *unscored([skipped])[0], "unscored", "notes", "worst"} == set(
        re.findall(r'"(\w+)"', block)
    )


def test_ranges_of_fields_are_those_that_are_read() -> None:
    found: dict[str, str] = {}
    for names, said in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ((?:\d+|up) to [\d,]+) \|$", VALIDATE, re.MULTILINE):
        found |= dict.fromkeys(re.findall(r"\w+", names), said)
    whole = {name: f"{least} to {largest:,}" for name, (least, largest) in WHOLE.items()}
    assert found == whole | {name: f"up to {largest:,.0f}" for name, largest in REAL.items()}


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


ROWS = [line for line in text_of("docs/troubleshooting.md").splitlines() if re.match(r"\| `\w+(Error|Warning): ", line)]
QUOTED = [words for row in ROWS for words in re.findall(r"`(\w+(?:Error|Warning): [^`]+)`", row.split(" | ")[0])]


def source() -> str:
    """The sources, with what is several literals in a row as one, and without the names of variables."""
    whole = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "galvatron_lite").rglob("*.py"))
    return re.sub(r"\{[^{}\n]*\}", "{}", re.sub(r'"\s*\n\s*f?"', "", whole))


def begin(kind: str) -> str:
    """The first words of a kind of error on the page, up to what depends on the case."""
    return next(words for words in QUOTED if words.startswith(f"{kind}: ")).split(": ", 1)[1].split("…")[0].strip()


def test_every_kind_is_on_the_page() -> None:
    kinds = {name for name, made in vars(errors).items() if inspect.isclass(made) and name.endswith("Error")}
    assert {words.split(":")[0] for words in QUOTED} == kinds - {"GalvatronError"} | {"UserWarning"}


def test_words_are_those_of_the_source() -> None:
    """Each part between what depends on the case is in the sources; the field of an InputError is an argument of it."""
    known = source()
    assert len(QUOTED) > 30
    for words in QUOTED:
        said = words.split(": ", 1)[1]
        said = re.sub(r"^([\w-]+): ('[\w ]+'|…) (cannot be used\. |is unknown\. )?|^([\w-]+) is missing\. ", "", said)
        parts = [part.strip() for part in re.split(r"…|(?<=:)$", said) if len(part.strip()) > 8]
        assert parts or said in FIELDS, words
        assert [part for part in parts if part not in known and part not in FIELDS] == [], words


FIELDS = {"plan.yaml:", "plan.yaml,", "--mem: …", "model: …"}
"""The file or field that is wrong, alone: what is said of it depends on the case."""


def test_what_ranks_that_call_different_collectives_get_is_quoted_as_gloo_says_it() -> None:
    assert text_of("docs/troubleshooting.md").count("Is there a distributed collective mismatch in your code?") == 2


def test_provoked_ones_begin_as_the_page_says() -> None:
    asked = {"model": "llama2-7b", "cluster": "a100-80gb", "gpus": 8, "batch": 64}
    with pytest.raises(errors.UnitError) as unit:
        plan(**asked, mem="lots")
    with pytest.raises(errors.InfeasibleError) as none:
        plan(**asked, mem="10GB")
    raised = [unit.value, none.value, errors.VerificationError([]), errors.SwitchError("carry", 1, "")]
    for error in raised:
        assert str(error).startswith(begin(type(error).__name__)), str(error)
