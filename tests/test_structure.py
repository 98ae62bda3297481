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


SHARED = {"batch_degree", "token_degree", "devices", "replicas", "more", "added", "split", "weight_slices"}
SHARED |= {"state_shards", "parameter_shards", "keeps_masters"}
"""Attributes of strategies that any dimension may have a part in: devices, shares of samples and of states, slices."""
FIELDS = {name for name in dir(Strategy) if not name.startswith("_")} - SHARED
UNMISTAKABLE = FIELDS - {"channels", "context", "data", "depth", "height", "recompute", "spatial", "tensor", "width"}
"""Fields whose names stand for nothing else; the others count where a strategy has them."""
OTHERS = {"kind", "work", "setting", "point", "environment", "overhead", "prior", "self", "_library"}
"""What has fields of such names and is no strategy: layers, work, points of profiles."""
APART = {"branch", "cyclic", "pipeline", "rng", "sharded"}
"""Folders of ``parallelism`` that split no layer: other kinds of plans, schedules, and what dimensions share."""
DIMENSIONS = {path.parent.name for path in (PACKAGE / "parallelism").glob("*/__init__.py")} - APART
APPLYING = ("runtime/", "profiler/")
"""Folders that import what splits layers: to train, and to measure what one device then does. Not what costs."""
NAMED = {
    "search/space.py": (3, "declares the space of proofs: fewest tokens, host memory only where nothing else fits"),
    "cost/layer.py": (2, "what layers of a stage share: the link to the host, shares of pixels"),
    "cost/layer_memory.py": (4, "what layers share: buckets of gradients; copies of weights where forward runs again"),
    "runtime/parameters/managed.py": (1, "makes the copies in host memory"),
    "runtime/sharding.py": (4, "hands settings to what splits the layer: the stage of ZeRO, what is gathered again"),
    "verify/conformance/layers.py": (4, "counts forward passes and kept bytes by what is computed again"),
    "verify/dry/kernels.py": (1, "attention on shares of tokens runs as a kernel that has no values"),
    "verify/dry/roles.py": (2, "which dim of a parameter shards divide"),
    "verify/dry/step.py": (1, "host memory of a dry run"),
    "verify/numbers/shrink.py": (5, "what is left out where a small layer cannot have it"),
    "verify/trial/check.py": (2, "runs blocks again in backward, as recomputation does"),
    "verify/trial/findings.py": (2, "whether states live elsewhere than in the model"),
    "analysis/neighbours.py": (2, "plain data parallelism takes the devices that no other dimension uses"),
    "analysis/report/plan_figures.py": (6, "patterns of the drawing, one for each value"),
    "analysis/step_time.py": (8, "shares out a layer's seconds by operator, as the estimate does"),
    "analysis/uncaptured.py": (11, "its subject: plans of data parallelism and ZeRO-1 alone"),
    "plans/io.py": (1, "layers without states may differ"),
    "profiler/estimate.py": (7, "points of profiles, at every value that a dimension runs"),
    "profiler/measure_layers.py": (1, "as above"),
    "profiler/measure_overhead.py": (2, "as above: exchanges of pixels"),
    "profiler/schema.py": (1, "as above"),
    "profiler/transfer.py": (1, "as above"),
}
"""What still names dimensions, how often, and why."""


def _owner(node: ast.AST | None) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def named_in(file: str, tree: ast.Module) -> int:
    """How often a file reads, sets or imports what is of one dimension: ``strategy.tensor``, ``Strategy(tensor=2)``,
    ``Recompute.FULL``, ``from ...zero.cost import``."""
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = _owner(node.value)
            count += (
                owner in ("Recompute", "Offload")
                or (node.attr in FIELDS and owner.endswith("strategy"))
                or (node.attr in UNMISTAKABLE and owner not in OTHERS)
            )
        elif isinstance(node, ast.Call) and _owner(node.func) in ("Strategy", "replace", "changed"):
            owner = _owner(node.args[0]) if node.args else ""
            names = FIELDS if _owner(node.func) == "Strategy" or owner.endswith("strategy") else UNMISTAKABLE
            count += 0 if owner in OTHERS else sum(word.arg in names for word in node.keywords)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("galvatron_lite.parallelism."):
            folder, _, module = str(node.module).removeprefix("galvatron_lite.parallelism.").partition(".")
            count += folder in DIMENSIONS and (module == "cost" or not file.startswith(APPLYING))
    return count


def test_dimensions_are_named_only_where_there_is_a_reason() -> None:
    """Ask ``Dimension`` instead (``parallelism/base.py``); where a file names them less often, lower its number."""
    counts = {name: named_in(name, tree) for name, tree in sources()}
    assert {name: count for name, count in counts.items() if count > NAMED.get(name, (0, ""))[0]} == {}
    tree = ast.parse("from galvatron_lite.parallelism.zero.cost import x\nx = other.zero_stage + Strategy(data=2)")
    assert named_in("search/new.py", tree) == 3
