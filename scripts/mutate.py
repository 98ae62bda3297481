"""Change lines of functions one at a time, and list the changes that no test of their room notices.

Changes are drawn from a seed: comparisons turned round, numbers off by one, statements dropped, arguments swapped. The
tests of a room are collected once and run once, to see which functions each of them calls, in the ranks of ``pool``
too. Every change is then tried in a fork: the changed code takes the place of the function's, and the tests that call
it run, the quickest first, until one fails. A run goes on where it ended (``--state``). A mutant that runs out of time
counts as noticed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import gc
import importlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

from tests.pool import PRELOADED, WorkerPool

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "galvatron_lite"
ROOMS = {
    "plans": ("plans/**/*.py", ["tests/plans", "tests/search/test_phases.py", "tests/cost/test_branched.py"]),
    "checkpoint": ("runtime/checkpoint/*.py", ["tests/runtime/checkpoint"]),
    "search": ("search/**/*.py", ["tests/search"]),
    "cost": ("cost/*.py", ["tests/cost", "tests/analysis", "tests/search/test_phases.py"]),
    "apply": ("parallelism/*/apply.py", ["tests/parallelism", "tests/equivalence"]),
}
"""Sources, and the tests that must notice a change of theirs."""
_FLIPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


_SYMMETRIC = {"range", "max", "min", "largest", "least", "maximum", "minimum"}
"""Functions whose first two arguments may change places, or may not."""


def changes(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Nodes within the functions of a module, and what each may be replaced by."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in dict.fromkeys(inner for function in functions for line in function.body for inner in ast.walk(line)):
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
            case ast.Call(args=[_, _, *_]), ast.Call() if _called(node.func) not in _SYMMETRIC:
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


def _called(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def mutated(text: str, node: ast.AST, new: ast.AST) -> str:
    """The text with the source of a node replaced."""
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
    before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]  # type: ignore[attr-defined]
    indent = b" " * node.col_offset  # type: ignore[attr-defined]
    written = ast.unparse(ast.fix_missing_locations(new)).encode().replace(b"\n", b"\n" + indent)
    return b"".join([*lines[:first], before + written + after, *lines[last + 1 :]]).decode()


Change = tuple[str, int, str, str]  # file, line, the text of the changed file, and the change as a diff
Names = dict[tuple[str, int], CodeType]


def draw(room: str, seed: int, count: int) -> list[Change]:
    """Changes of a room by chance."""
    nodes = []
    for path in sorted(PACKAGE.glob(ROOMS[room][0])):
        text = path.read_text()
        nodes += [(path, text, node, new) for node, new in changes(ast.parse(text))]
    random.Random(seed).shuffle(nodes)
    drawn: list[Change] = []
    for path, text, node, new in nodes:
        if len(drawn) == count:
            break
        after = mutated(text, node, new)
        with suppress(SyntaxError):  # within an f-string
            if ast.dump(ast.parse(after)) != ast.dump(ast.parse(text)):
                name = str(path.relative_to(ROOT))
                diff = "".join(difflib.unified_diff(text.splitlines(True), after.splitlines(True), name, name, n=0))
                drawn.append((str(path), node.lineno, after, diff))  # type: ignore[attr-defined]
    return drawn


def functions_of(text: str, file: str) -> Names:
    """Code by its qualified name, and its number among those of one name."""
    seen, codes = Counter[str](), Names()
    pending = [compile(text, file, "exec", dont_inherit=True)]
    while pending:
        code = pending.pop(0)
        codes[code.co_qualname, seen[code.co_qualname]] = code
        seen[code.co_qualname] += 1
        pending += [one for one in code.co_consts if isinstance(one, CodeType)]
    return codes


def changed_code(file: str, after: str) -> dict[tuple[str, int], CodeType]:
    """The code of functions that a change alters, by the name and the first line that they have without it."""
    before, new = functions_of(Path(file).read_text(), file), functions_of(after, file)
    return {(key[0], before[key].co_firstlineno): code for key, code in new.items() if before.get(key, code) != code}


def apply(file: str, after: str) -> None:
    """Put changed code in the place of that of every function made of a file."""
    importlib.import_module(".".join(Path(file).relative_to(ROOT).with_suffix("").parts))
    codes = changed_code(file, after)
    gc.unfreeze()
    for one in gc.get_objects():
        if isinstance(one, FunctionType) and one.__code__.co_filename == file:
            key = one.__code__.co_qualname, one.__code__.co_firstlineno
            one.__code__ = codes.get(key, one.__code__)


class Calls:
    """Notes which functions of this package are called, in all threads."""

    def __init__(self) -> None:
        self.seen = set[tuple[str, str]]()

    def __enter__(self) -> Calls:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            self.seen.add((frame.f_code.co_filename, frame.f_code.co_qualname))


def in_rank(job: Callable[..., Any], change: tuple[str, str] | None, options: dict[str, Any]) -> Any:
    """A job of the pool under a change; without one its result and the functions that it called."""
    if change is not None:
        signal.alarm(300)  # nobody waits for what runs for ever
        apply(*change)
        return job(**options)
    with Calls() as calls:
        return job(**options), calls.seen


in_rank.__module__ = "scripts.mutate"


class Mutation:
    """Plugin of pytest that tries changes instead of running the tests."""

    def __init__(self, room: str, seed: int, count: int, state: Path) -> None:
        self._room, self._seed, self._count, self._state = room, seed, count, state
        self._change: tuple[str, str] | None = None
        self._in_ranks = set[tuple[str, str]]()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Find which tests call what, then try every change."""
        self._share_pool()
        tests = {item.nodeid: item for item in session.items}
        called = self._called(session)
        done = {line["change"]: line for line in map(json.loads, self._lines(self._state))}
        for file, line, after, diff in draw(self._room, self._seed, self._count):
            if diff not in done:
                done[diff] = {"change": diff, **self._try(session, tests, called, file, after)}
                with self._state.open("a") as state:
                    state.write(json.dumps(done[diff]) + "\n")
                if done[diff]["survived"]:
                    print(f"{file}:{line} survives {done[diff]['tests']} tests\n{diff}", file=sys.stderr, flush=True)
        survivors = sum(one["survived"] for one in done.values())
        print(f"{self._room}: {survivors} of {len(done)} changes survive", file=sys.stderr)
        session.testsfailed = int(10 * survivors >= len(done))
        return True

    def _try(
        self, session: pytest.Session, tests: dict[str, pytest.Item], called: list[Any], file: str, after: str
    ) -> dict[str, Any]:
        """Run the tests that call a changed function, the quickest first, and any that are new."""
        names = [name for name, _ in changed_code(file, after)]
        known = {one["test"] for one in called}
        calling = [
            one for one in called if one["test"] in tests and any([file, name] in one["calls"] for name in names)
        ]
        calling.sort(key=lambda one: one["seconds"])
        chosen = [item for name, item in tests.items() if name not in known]
        chosen += [tests[one["test"]] for one in calling]

        def run() -> int:
            self._change = file, after
            apply(file, after)
            for item in chosen:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                if session.testsfailed:
                    return 1
            return 0

        start = time.monotonic()
        survived = in_fork(run, 60 + 4 * sum(one["seconds"] for one in calling)) == 0
        return {"survived": survived, "tests": len(chosen), "seconds": time.monotonic() - start}

    def _called(self, session: pytest.Session) -> list[Any]:
        """What every test calls; kept beside the state."""
        file = self._state.with_name(f"{self._state.stem}-calls-{self._room}.jsonl")

        def run() -> int:
            with file.open("w") as stream:
                for item in session.items:
                    start = time.monotonic()
                    self._in_ranks.clear()
                    with Calls() as calls:
                        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                    # a test that fails as it is tells nothing
                    seen = [] if session.testsfailed else sorted(calls.seen | self._in_ranks)
                    session.testsfailed = 0
                    line = {"test": item.nodeid, "seconds": time.monotonic() - start, "calls": seen}
                    stream.write(json.dumps(line) + "\n")
            return 0

        if not file.exists():
            in_fork(run, 3600)
        called = [json.loads(line) for line in self._lines(file)]
        silent = sum(not one["calls"] for one in called)
        print(f"{len(called)} tests; {silent} fail, are skipped or call nothing", file=sys.stderr, flush=True)
        return called

    def _lines(self, file: Path) -> list[str]:
        return file.read_text().splitlines() if file.exists() else []

    def _share_pool(self) -> None:
        """Forks use one server of ranks, which run under the change."""
        forkserver.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
        plain = WorkerPool.run

        def run(
            pool: WorkerPool, world: int, function: Callable[..., Any], *, timeout: float = 280.0, **kw: Any
        ) -> Any:
            replies = plain(pool, world, in_rank, timeout=timeout, job=function, change=self._change, options=kw)
            if self._change is None:
                self._in_ranks.update(*(calls for _, calls in replies))
                replies = [reply for reply, _ in replies]
            return replies

        WorkerPool.run = run  # type: ignore[method-assign]


def in_fork(act: Callable[[], int], limit: float) -> int:
    """What a function returns in a fork of this process, which leaves nothing behind; -1 where it takes too long."""
    child = os.fork()
    if child == 0:
        os.setsid()
        status = 1
        with suppress(BaseException):
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            status = act()
        os._exit(status)
    end = time.monotonic() + limit
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if ended == (0, 0):
        os.waitpid(child, 0)
        return -1
    return os.waitstatus_to_exitcode(ended[1])


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("room", choices=list(ROOMS))
    options.add_argument("--count", type=int, default=40)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--state", type=Path, default=Path("build/mutate.jsonl"), help="to go on from")
    options.add_argument("--tests", nargs="*", help="instead of the room's")
    asked = options.parse_args()
    state = asked.state.with_stem(f"{asked.state.stem}-{asked.room}")
    state.parent.mkdir(parents=True, exist_ok=True)
    arguments = ["-q", "-s", "-p", "no:cacheprovider", "-o", "timeout=0", *(asked.tests or ROOMS[asked.room][1])]
    return int(pytest.main(arguments, [Mutation(asked.room, asked.seed, asked.count, state)]))


if __name__ == "__main__":
    raise SystemExit(main())
