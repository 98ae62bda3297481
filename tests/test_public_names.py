from __future__ import annotations

import subprocess
import sys

import galvatron_lite

NAMES = [
    "Adapt", "Cluster", "ModelGraph", "Plan", "Profile", "as_one_process", "auto_parallelize", "best_batch",
    "cheapest", "compare", "evaluate", "explain", "fewest_devices", "pareto_front", "plan", "profile", "read_plan",
    "same_randomness", "verify_plan",
]  # fmt: skip


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
