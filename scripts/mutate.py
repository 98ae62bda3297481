"""Change lines one at a time, in a copy of the tree, and list the changes that no test of their room notices.

Changes are drawn from a seed: comparisons turned round, numbers off by one, statements dropped, arguments swapped. A
run goes on where it ended (``--state``). A mutant that runs out of time counts as noticed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "galvatron_lite"
ROOMS = {
    "plans/io.py": ["tests/plans/test_io.py", "tests/plans"],
    "parallelism/*/apply.py": ["tests/parallelism", "tests/equivalence"],
    "runtime/checkpoint/*.py": ["tests/runtime/checkpoint"],
    "search/**/*.py": ["tests/search"],
    "cost/*.py": ["tests/cost", "tests/analysis"],
}
"""Sources, and the tests that must notice a change of theirs, the quickest first."""
_FLIPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


def changes(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Nodes of a module, and what each may be replaced by."""
    for node in ast.walk(tree):
        new = copy.deepcopy(node)
        match node, new:
            case ast.Compare(), ast.Compare() if type(new.ops[0]) in _FLIPS:
                new.ops[0] = _FLIPS[type(new.ops[0])]()
            case ast.Constant(value=bool()), ast.Constant():
                new.value = not node.value
            case ast.Constant(value=int(number)), ast.Constant():
                new.value = number + 1
            case ast.BoolOp(), ast.BoolOp():
                new.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            case ast.Call(args=[_, _, *_]), ast.Call() if (
                not isinstance(node.func, ast.Name) or node.func.id != "range"
            ):
                new.args[:2] = new.args[1::-1]
            case ast.Expr(value=ast.Call()) | ast.AugAssign(), _:
                new = ast.copy_location(ast.Pass(), node)
            case ast.For(), ast.For():
                new.iter = ast.Subscript(
                    ast.Call(ast.Name("list", ast.Load()), [new.iter], []), ast.Slice(None, ast.Constant(1)), ast.Load()
                )
            case _:
                continue
        yield node, new


def mutated(text: str, node: ast.AST, new: ast.AST) -> str:
    """The text with the source of a node replaced."""
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
    before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]  # type: ignore[attr-defined]
    indent = b" " * node.col_offset  # type: ignore[attr-defined]
    written = ast.unparse(ast.fix_missing_locations(new)).encode().replace(b"\n", b"\n" + indent)
    return b"".join([*lines[:first], before + written + after, *lines[last + 1 :]]).decode()


def draw(rooms: list[str], seed: int, count: int) -> list[tuple[str, str, int, str]]:
    """Changes by chance: room, file, line, and the text of the changed file."""
    drawn = random.Random(seed)
    every = []
    for room in rooms:
        for path in sorted((ROOT / PACKAGE).glob(room)):
            text = path.read_text()
            every += [(room, path, text, node, new) for node, new in changes(ast.parse(text))]
    drawn.shuffle(every)
    made = []
    for room, path, text, node, new in every:
        after = mutated(text, node, new)
        try:
            if ast.dump(ast.parse(after)) == ast.dump(ast.parse(text)):
                continue
        except SyntaxError:  # within an f-string
            continue
        made.append((room, str(path.relative_to(ROOT)), node.lineno, after))  # type: ignore[attr-defined]
        if len(made) == count:
            break
    return made


def noticed(tree: Path, tests: list[str], limit: float) -> bool:
    """Whether a test fails, or does not end in time."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header"]
    for test in tests:
        try:
            ran = subprocess.run([*command, test], cwd=tree, env=environment, capture_output=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return True
        if ran.returncode:
            return True
    return False


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--room", action="append", choices=list(ROOMS), help="all if not given; may be given again")
    options.add_argument("--count", type=int, default=200)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--seconds", type=float, default=900, help="of one run of tests")
    options.add_argument("--state", type=Path, default=Path("build/mutate.jsonl"), help="to go on from")
    asked = options.parse_args()
    asked.state.parent.mkdir(parents=True, exist_ok=True)
    done = {}
    if asked.state.exists():
        done = {line["change"]: line for line in map(json.loads, asked.state.read_text().splitlines())}
    skipped = shutil.ignore_patterns(".git", ".venv*", "build", "__pycache__", ".*_cache")
    with tempfile.TemporaryDirectory() as folder, asked.state.open("a") as state:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=skipped, symlinks=True)
        for room in asked.room or ROOMS:
            if noticed(tree, ROOMS[room], asked.seconds):
                print(f"The tests of {room} do not pass within {asked.seconds:g} s as it is.")
                return 2
        for room, file, line, after in draw(asked.room or list(ROOMS), asked.seed, asked.count):
            before = (ROOT / file).read_text()
            change = "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), file, file, n=0))
            if change in done:
                continue
            (tree / file).write_text(after)
            survived = not noticed(tree, ROOMS[room], asked.seconds)
            (tree / file).write_text(before)
            done[change] = {"change": change, "place": f"{file}:{line}", "survived": survived}
            state.write(json.dumps(done[change]) + "\n")
            state.flush()
            if survived:
                print(f"{file}:{line} survives\n{change}", flush=True)
    survivors = sum(one["survived"] for one in done.values())
    print(f"{survivors} of {len(done)} changes survive")
    return int(10 * survivors >= len(done))


if __name__ == "__main__":
    raise SystemExit(main())
