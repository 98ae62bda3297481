"""What the pages point to is there."""

import re
from pathlib import Path

import pytest

from .pages import PAGES, ROOT, anchors, blocks, code, links, named, text_of


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page.read_text(encoding="utf-8")):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            text = (target / "README.md" if target.is_dir() else target).read_text(encoding="utf-8")
            assert anchor in anchors(text), link


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=named)
def test_files_that_are_named_exist(page: Path) -> None:
    """``profiler/roofline.py`` is a module of the package, ``tests/...`` a file of the checkout."""
    paths = [
        span for span in code(page.read_text(encoding="utf-8")) if re.fullmatch(r"[\w*]+(/[\w*]+)+(\.\w+)?/?", span)
    ]
    for path in paths:
        found = [
            root for root in (ROOT, ROOT / "galvatron_lite") if list(root.glob(path)) or list(root.glob(f"{path}.py"))
        ]
        assert found, path


def test_every_page_is_in_the_index() -> None:
    listed = links((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} <= set(listed)
    assert "docs/README.md" in links((ROOT / "README.md").read_text(encoding="utf-8"))


def test_every_folder_is_in_the_design() -> None:
    listed = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("## The folders")[1].split("\n## ")[0]
    package = ROOT / "galvatron_lite"
    found = [path.parent for at in ("*", "runtime/*", "parallelism/*") for path in package.glob(f"{at}/__init__.py")]
    assert len(found) > 40
    assert [path.name for path in found if not re.search(rf"(?<![\w/]){path.name}/", listed)] == []


def test_diffs_of_the_guide_are_in_the_code() -> None:
    diffs = "".join(blocks(text_of("CONTRIBUTING.md"), "diff"))
    assert len(re.findall(r"^\+\+\+ ", diffs, re.MULTILINE)) > 5
    for part in diffs.split("+++ ")[1:]:
        name, *lines = part.splitlines()
        written = set(text_of(name).splitlines())
        assert [line for line in lines if line[1:] not in written] == [], name
