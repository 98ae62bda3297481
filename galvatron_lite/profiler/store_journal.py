"""Finished points on disk while a profile is being made, so that nothing is lost and nothing is measured twice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_IDENTITY = "identity"


class Journal:
    """One JSON object a line: first what is being measured, then one finished point each.

    A line that a crash cut short is dropped. A journal of something else is begun anew.

    Args:
        path: of the file; made when first written to.
        identity: what tells this measurement from another (a hash of model, machine and settings).
        resume: False begins anew whatever the file holds.
    """

    def __init__(self, path: Path, identity: str, resume: bool = True) -> None:
        self.path = path
        lines = _whole_lines(path) if resume else []
        same = bool(lines) and lines[0].get(_IDENTITY) == identity
        self.finished: dict[str, Any] = {line["key"]: line["value"] for line in lines[1:] if "key" in line and same}
        path.parent.mkdir(parents=True, exist_ok=True)
        if not same:
            path.write_text("", encoding="utf-8")
            self._append({_IDENTITY: identity})

    def add(self, key: str, value: Any) -> None:
        """Keep a finished point; it is on disk when this returns."""
        self.finished[key] = value
        self._append({"key": key, "value": value})

    def remove(self) -> None:
        """Delete the file: the profile is written."""
        self.path.unlink(missing_ok=True)

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines that can be read; what follows the last line break is cut off the file."""
    try:
        raw = path.read_bytes()
    except OSError:
        return []
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) < len(raw):
        with path.open("r+b") as stream:
            stream.truncate(len(whole))
    parsed = [_parse(line) for line in whole.splitlines()]
    return [line for line in parsed if line is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
