"""The pages of the documentation, and what is in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "configs").glob("*/README.md")), ROOT / "profiles" / "published" / "README.md",
)  # fmt: skip

_FENCE = re.compile(r"^( *)```[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"^ {4}(\S[^\n]*)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")


def text_of(name: str) -> str:
    """A page by its path from the root."""
    return (ROOT / name).read_text(encoding="utf-8")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def links(text: str) -> list[str]:
    return _LINK.findall(_FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """Anchors as GitHub makes them from headings."""
    headings = re.findall(r"^#+ +(.+)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code(text: str) -> list[str]:
    """What stands between backquotes."""
    return _CODE.findall(_FENCE.sub("", text))


def commands(text: str) -> Iterator[str]:
    """Lines of code that run ``galvatron`` or a script, without prompt and comment."""
    blocks = [match[2] for match in _FENCE.finditer(text)] + _INDENTED.findall(_FENCE.sub("", text))
    inline = [span for span in code(text) if re.match(r"(galvatron|scripts/\w+) ", span)]
    for line in (line for block in (*blocks, *inline) for line in block.splitlines()):
        words = line.strip().removeprefix("$ ").split(" #")[0].strip()
        if re.match(r"(galvatron|scripts/\w+)( |$)", words):
            yield words


def blocks(text: str, language: str) -> list[str]:
    """Blocks of code of one language, as they stand."""
    return [match[1] for match in re.finditer(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]


def script_source(name: str) -> str:
    """A script with the modules that go by its name (``calibrate_rows.py``), or of the study that it runs."""
    script = ROOT / "scripts" / name
    study = {"calibrate": "calibration"}.get(name, name)
    modules = sorted([*(ROOT / "scripts").glob(f"{name}*.py"), *(ROOT / "scripts" / "studies" / study).glob("*.py")])
    return "".join(path.read_text(encoding="utf-8") for path in (script, *modules))
