"""The table of ``docs/support.md``, from ``docs/data/support.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docs_scores import replaced
from support_matrix_ways import WAYS

from galvatron_lite.files import read_data, write_text

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "data" / "support.json"
PAGE = ROOT / "docs" / "support.md"

NOT_RUN = "not run yet"
SIGNS = {
    "works": "yes",
    "falls back": "partly",
    "no": "no",
    "wrong": "**wrong**",
    "crashes": "**crashes**",
    "not known": "?",
}


def table(data: Mapping[str, Any]) -> str:
    """A row a family, a column a way, and below why what does not run does not."""
    rows = {name: row for name, row in data["families"].items() if "ways" in row}
    heads = [way.name for way in WAYS]
    lines = ["| family | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    lines += [
        f"| {name} | " + " | ".join(cell(row["ways"].get(head)) for head in heads) + " |" for name, row in rows.items()
    ]
    return "\n".join([caption(data, len(rows)), "", *lines])


def caption(data: Mapping[str, Any], count: int) -> str:
    """What was run, and when."""
    of = data["measured"]
    days = sorted({row["date"] for row in data["families"].values() if "ways" in row})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return (
        f"{count} families, measured here {when}: torch {of['torch']}, transformers {of['transformers']}, Python "
        f"{of['python']}, two gloo processes (auto4: four)."
    )


def cell(found: Mapping[str, Any] | None) -> str:
    """The state of a way; nothing where the model has nothing to try it on."""
    if found is None:
        return ""
    sign = SIGNS[found["state"]]
    sign = f"{sign}*" if found["state"] == "works" and found["why"] else sign
    return f"{sign} {found['error']:.0e}" if found.get("error") is not None else sign


def reasons(data: Mapping[str, Any]) -> str:
    """Every reason once, with the families and ways that it is of."""
    said: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, row in data["families"].items():
        for way, found in row.get("ways", {}).items():
            if found["why"]:
                said.setdefault((found["state"], found["why"]), {}).setdefault(name, []).append(way)
    order = list(SIGNS)
    lines = ["| families | ways | | why, as the message says it |", "|---|---|---|---|"]
    for (state, why), of in sorted(said.items(), key=lambda item: -order.index(item[0][0])):
        ways = sorted({way for own in of.values() for way in own}, key=[way.name for way in WAYS].index)
        sign = "yes*" if state == "works" else SIGNS[state]
        lines.append(f"| {', '.join(of)} | {', '.join(ways)} | {sign} | {plain(why)} |")
    return "\n".join(lines)


def untried(data: Mapping[str, Any]) -> str:
    """Families that cannot be tried, and why."""
    rows = {name: row for name, row in data["families"].items() if "ways" not in row}
    if not rows:
        return "None."
    lines = ["| family | why |", "|---|---|"]
    return "\n".join(
        [
            *lines,
            *(
                f"| {name} | {plain(row.get('refused') or row.get('failed') or 'not run yet')} |"
                for name, row in rows.items()
            ),
        ]
    )


def plain(text: str) -> str:
    """Text that a cell of a table can hold."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("`", "'")


PARTS: Sequence[tuple[str, Any]] = (("support", table), ("reasons", reasons), ("untried", untried))
"""Markers of the page, and what is written between them."""


def page_of(text: str, data: Mapping[str, Any]) -> str:
    """The page with what the data says."""
    for name, make in PARTS:
        text = replaced(text, name, make(data))
    return text


def write_page() -> None:
    """Write the tables into the page."""
    write_text(PAGE, page_of(PAGE.read_text(encoding="utf-8"), read_data(DATA)))
