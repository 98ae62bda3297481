"""What is known of a schedule stands in ``parallelism``: the sources of other folders name none. How often they still
name a dimension is written down, and does not grow."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import galvatron_lite
from galvatron_lite.parallelism.pipeline.schedule import DELAYED_SCHEDULE, Schedule, schedule_names, schedules
from galvatron_lite.parallelism.strategy import Strategy

PACKAGE = Path(galvatron_lite.__file__).parent
FOLDERS = ("search", "cost", "runtime", "verify", "analysis", "plans", "cli", "profiler")
ELSEWHERE = {
    "plans/export": "writes the settings of other training software, in its words",
    "search/delayed.py": "the engine of delayed gradients, which no pipeline runs",
}
"""What may name schedules there, and why. Other folders that do: oracle (ParaDL's forecasts are of one schedule each),
peers (other planners' plans) and validate (published runs)."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            name = path.relative_to(PACKAGE).as_posix()
            if not name.startswith(tuple(ELSEWHERE)):
                yield name, ast.parse(path.read_text(encoding="utf-8"))


def words(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Identifiers, and texts that are no docstrings, with their lines."""
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for name in ("id", "attr", "arg", "name", "module"):
            if isinstance(word := getattr(node, name, None), str):
                yield line, word
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield line, node.value


def test_no_schedule_is_named_outside_parallelism() -> None:
    """Delayed gradients are a field of plans, ``cyclic``; as a schedule they are named nowhere."""
    names = {name for name in schedule_names() if name != DELAYED_SCHEDULE}
    constants = {name for name in Schedule.__annotations__ if name.isupper()}
    assert {getattr(Schedule, name) for name in constants} == set(schedules())
    spelled = {re.sub("[^a-z0-9]", "_", name) for name in names} | {name.lower() for name in constants}
    text = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, names))})(?![\w-])|schedule[= ]{DELAYED_SCHEDULE}", re.I)
    code = re.compile(f"(?i:{'|'.join(spelled - {DELAYED_SCHEDULE})})|^CYCLIC$")
    found = [
        f"{name}:{line}: {word}"
        for name, tree in sources()
        for line, word in words(tree)
        if (code.search(word) if word.isidentifier() and word != DELAYED_SCHEDULE else text.search(word))
    ]
    assert found == []
    assert text.search("takes 1f1b as it is")
    assert code.search("run_zero_bubble_1p")


STILL = {"search": 3, "cost": 4, "runtime": 6, "verify": 4, "analysis": 14, "plans": 7, "cli": 0, "profiler": 8}
"""By folder, how often sources name a field of a dimension, where they could ask it."""

UNMISTAKABLE = {"zero_stage", "sequence_parallel", "ulysses", "expert_tensor", "filters", "slices"}
UNMISTAKABLE |= {"offloads_states", "offloads_activations"}
"""Attributes that strategies alone have."""
SHARED = {"batch_degree", "token_degree", "devices", "replicas", "more", "added"}
SHARED |= {"weight_slices", "state_shards", "parameter_shards"}
"""What any dimension may have a part in: devices, shares of samples and of what they are made of, slices, shards."""
KNOWN = {name for name in dir(Strategy) if not name.startswith("_")} - SHARED


def _names_dimension(node: ast.AST) -> bool:
    """Whether it reads or sets a field of one dimension: ``strategy.tensor``, ``Strategy(tensor=2)``."""
    if isinstance(node, ast.Attribute):
        owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
        return node.attr in UNMISTAKABLE or (node.attr in KNOWN and owner.endswith("strategy"))
    called = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Strategy"
    return called and any(word.arg in KNOWN for word in node.keywords)  # type: ignore[attr-defined]


def naming() -> dict[str, int]:
    """How often each folder names a field of a dimension."""
    found = Counter[str]()
    for name, tree in sources():
        found[name.partition("/")[0]] += sum(map(_names_dimension, ast.walk(tree)))
    return dict(found)


def test_dimensions_are_named_no_more_often() -> None:
    """Where a folder names them less often, write its new number down."""
    assert {folder: count for folder, count in naming().items() if count > STILL[folder]} == {}
