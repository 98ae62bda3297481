"""Folders import downwards: a folder and those that it imports make no circle, type imports included."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import networkx

import galvatron_lite

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(galvatron_lite.__file__).parent


@cache
def imports() -> networkx.DiGraph:
    """Folders of the package, and modules beside them, with what each imports."""
    graph = networkx.DiGraph()
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE)
        folder = inside.parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
    order = re.findall(r"^      (\w+)/", listed, re.MULTILINE)
    assert len(order) > 15
    upwards = [(a, b) for a, b in imports().edges if {a, b} <= set(order) and order.index(a) > order.index(b)]
    assert upwards == []


def test_no_two_public_classes_share_a_name() -> None:
    names = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []
