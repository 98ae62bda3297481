"""The order of folders, public names, what is imported, and what names schedules and dimensions where."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx

import galvatron_lite
from galvatron_lite.parallelism.pipeline.schedule import DELAYED_SCHEDULE, Schedule, schedule_names, schedules
from galvatron_lite.parallelism.strategy import Strategy

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(galvatron_lite.__file__).parent


@cache
def parsed(path: Path) -> ast.Module:
    """The tree of a module: parsing the package takes seconds."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports() -> networkx.DiGraph:
    """Folders of the package, and modules beside them, with what each imports."""
    graph = networkx.DiGraph()
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE)
        folder = inside.parts[0].removesuffix(".py")
        for node in ast.walk(parsed(path)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if names == ["galvatron_lite"] and isinstance(node, ast.ImportFrom):
                names = [f"galvatron_lite.{alias.name}" for alias in node.names]
            graph.add_edges_from((folder, name.split(".")[1]) for name in names if name.startswith("galvatron_lite."))
    return graph


def test_folders_import_downwards() -> None:
    circles = [part for part in networkx.strongly_connected_components(imports()) if len(part) > 1]
    assert not circles


def test_folders_stand_in_the_order_of_the_design() -> None:
    listed = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("## The folders")[1].split("\n## ")[0]
    order = re.findall(r"^      ([a-z]\w*)(?:/|\.py)", listed, re.MULTILINE)
    assert sorted(order) == sorted({name for name in imports() if not name.startswith("_")})
    upwards = [(a, b) for a, b in imports().edges if {a, b} <= set(order) and order.index(a) > order.index(b)]
    assert upwards == []


def test_no_two_public_classes_share_a_name() -> None:
    names = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


NAMES = [
    "Adapt", "Cluster", "ModelGraph", "Plan", "Profile", "as_one_process", "auto_parallelize", "best_batch",
    "cheapest", "compare", "evaluate", "explain", "fewest_devices", "pareto_front", "plan", "profile", "read_plan",
    "same_randomness", "verify_plan",
]  # fmt: skip


NO_NAMES = {"own", "found", "given", "made", "known", "told", "asked", "said", "laid", "whole", "thing", "way", "ways"}
"""Words that do not say what they name."""
WRITTEN = {"TensorSplit.whole", "ModelGraph.whole", "ParameterSplit.whole", "LearntConstant.told"}
WRITTEN |= {"Check.said", "Bound.said", "Buys.said"}
"""Fields that stand in profiles, or in what ``--json`` prints."""


def test_names_say_what_they_name() -> None:
    named = list[str]()
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                fields = (part.target for part in node.body if isinstance(part, ast.AnnAssign))
                named += [f"{node.name}.{field.id}" for field in fields if isinstance(field, ast.Name)]
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                named.append(f"{name}.{node.name}")
            if isinstance(node, ast.arguments):
                named += [f"{name}.{word.arg}" for word in (*node.posonlyargs, *node.args, *node.kwonlyargs)]
        named.append(name.removesuffix(".py").replace("/", "."))
    empty = {name for name in named if name.rpartition(".")[2].strip("_").lower() in NO_NAMES}
    assert {name for name in empty if name not in WRITTEN} == set()


def test_the_public_names_are_pinned() -> None:
    assert galvatron_lite.__all__ == NAMES
    assert set(NAMES) <= set(dir(galvatron_lite))


def test_every_public_name_can_be_had_and_says_what_it_is() -> None:
    for name in NAMES:
        assert getattr(galvatron_lite, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(galvatron_lite, "autoparallelise")


def _modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_the_package_imports_nothing_heavy() -> None:
    assert not _modules_after("import galvatron_lite") & {"torch", "pydantic", "numpy", "networkx", "pulp", "deepspeed"}


def test_planner_modules_do_not_import_torch() -> None:
    code = (
        "import importlib, pathlib, galvatron_lite as g\n"
        "root = pathlib.Path(g.__path__[0])\n"
        "files = [path.relative_to(root.parent).with_suffix('') for path in sorted(root.rglob('*.py'))]\n"
        "names = ['.'.join(path.parts).removesuffix('.__init__') for path in files]\n"
        "clean = ('cluster', 'cost', 'search', 'plans', 'cli', 'model.graph', 'model.shapes', 'profiler.schema',"
        " 'profiler.estimate', 'profiler.store', 'parallelism.base', 'parallelism.registry', 'api', 'analysis',"
        " 'peers', 'explainer')\n"
        "for n in names:\n"
        "    if n.removeprefix('galvatron_lite.').startswith(clean) or n.endswith('.cost'):\n"
        "        importlib.import_module(n)"
    )
    assert "torch" not in _modules_after(code)


FOLDERS = ("search", "cost", "runtime", "verify", "analysis", "plans", "cli", "profiler")
ELSEWHERE = {
    "plans/export": "writes the settings of other training software, in its words",
    "search/families/delayed.py": "the engine of delayed gradients, which no pipeline runs",
}
"""What may name schedules there, and why. Other folders that do: oracle (ParaDL's forecasts are of one schedule each),
peers (other planners' plans) and validate (published runs)."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            name = path.relative_to(PACKAGE).as_posix()
            if not name.startswith(tuple(ELSEWHERE)):
                yield name, parsed(path)


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


STILL = {"search": 3, "cost": 4, "runtime": 6, "verify": 2, "analysis": 14, "plans": 7, "cli": 0, "profiler": 7}
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
