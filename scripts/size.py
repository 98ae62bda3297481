"""Lines of every folder, code apart from docstrings and comments; run by ``scripts/size``. Needs nothing installed."""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
PAGE, BEGIN, END = ROOT / "CONTRIBUTING.md", "<!-- size: begin (scripts/size --write) -->", "<!-- size: end -->"
BUDGETS = {"package": 62_000, "tests": 45_000, "scripts": 7_000}


@dataclass
class Size:
    """Lines of some files: ``files`` and ``functions`` hold (lines, name) pairs."""

    kinds: Counter[str] = field(default_factory=Counter)
    files: list[tuple[int, str]] = field(default_factory=list)
    functions: list[tuple[int, str]] = field(default_factory=list)

    def add(self, path: Path) -> None:
        """Count a Python file."""
        text = path.read_text(encoding="utf-8")
        name = str(path.relative_to(ROOT))
        tree = ast.parse(text)
        strings, lines = docstring_lines(tree), text.splitlines()
        comments = comment_lines(text)
        for number, line in enumerate(lines, 1):
            kind = "docs" if number in strings or number in comments else "code" if line.strip() else "blank"
            self.kinds[kind] += 1
        self.files.append((len(lines), name))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                start = node.body[1 if ast.get_docstring(node, clean=False) and len(node.body) > 1 else 0].lineno
                self.functions.append(((node.end_lineno or start) - start + 1, f"{name}:{node.name}"))

    def row(self, name: str) -> list[str]:
        """The folder's row of the table."""
        counts = [f"{sum(self.kinds.values()):,}", *(f"{self.kinds[kind]:,}" for kind in ("code", "docs"))]
        sizes = [length for length, _ in self.files]
        bodies = [length for length, _ in self.functions] or [0]
        return [name, str(len(sizes)), *counts, f"{median(sizes):.0f}", str(max(sizes)), f"{median(bodies):.0f}",
                str(max(bodies))]  # fmt: skip


def docstring_lines(tree: ast.Module) -> set[int]:
    """Lines that docstrings take, those of attributes too."""
    found: set[int] = set()
    for node in ast.walk(tree):
        for child in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                found.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    return found


def comment_lines(text: str) -> set[int]:
    """Lines that hold nothing but a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {one.start[0] for one in tokens if one.type == tokenize.COMMENT and one.line.strip().startswith("#")}


def measured(folder: Path, *, deep: bool = True) -> Size:
    """The size of a folder's Python files, those without a suffix left out."""
    size = Size()
    for path in sorted(folder.rglob("*.py") if deep else folder.glob("*.py")):
        size.add(path)
    return size


def table() -> list[list[str]]:
    """Header and rows: every folder of the package, then the package, tests and scripts."""
    package = ROOT / "galvatron_lite"
    rows = [["folder", "files", "lines", "code", "docs", "file: median", "longest", "function: median", "longest"]]
    rows += [measured(one).row(f"{one.name}/") for one in sorted(package.iterdir()) if list(one.rglob("*.py"))]
    rows.append(measured(package, deep=False).row("modules beside them"))
    places = {"package": package, "tests": ROOT / "tests", "scripts": ROOT / "scripts"}
    return rows + [measured(places[name]).row(f"**{name}** (goal {goal:,})") for name, goal in BUDGETS.items()]


def main() -> None:
    """Print the table, or write it into CONTRIBUTING.md."""
    parser = argparse.ArgumentParser(prog="scripts/size", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into CONTRIBUTING.md")
    rows = table()
    rule = ["---"] + ["---:"] * (len(rows[0]) - 1)
    text = "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], rule, *rows[1:]])
    if not parser.parse_args().write:
        print(text)
        return
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
