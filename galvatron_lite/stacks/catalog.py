"""Training frameworks by name, as ``configs/stacks/stacks.yaml`` describes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from galvatron_lite.files import from_data, read_data, to_data
from galvatron_lite.folders import config_folder
from galvatron_lite.model.kernels import EAGER
from galvatron_lite.stacks.schema import Stack


def _with_base(entry: str | Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry (or the entry of a name) with the fields that it inherits from its ``base``."""
    if isinstance(entry, str):
        return _with_base(table[entry], table)
    inherited = _with_base(entry["base"], table) if "base" in entry else {}
    return {**inherited, **{name: value for name, value in entry.items() if name != "base"}}


def _read_stacks() -> tuple[dict[str, Stack], dict[str, Stack]]:
    """Return every stack by its name, and by the regular expression of the names people call it."""
    path = config_folder("stacks") / "stacks.yaml"
    data = read_data(path)
    presets = {"kernels": {"galvatron": to_data(EAGER), **data["kernels"]}, "states": data["states"]}
    presets["fp16_states"] = presets["states"]
    stacks, called = dict[str, Stack](), dict[str, Stack]()
    for key, entry in data["stacks"].items():
        stated = {"name": key, **_with_base({"name": key, **entry}, data["stacks"])}
        stated.pop("called", None)
        stated |= {name: _with_base(stated[name], table) for name, table in presets.items() if name in stated}
        stack = stacks[stated["name"]] = from_data(Stack, stated, f"{path}, {key}")
        if "called" in entry:
            called[entry["called"]] = stack
    return stacks, called


STACKS, _CALLED = _read_stacks()
"""Every stack by name."""
GALVATRON, DEFAULT = STACKS["galvatron"], STACKS["default"]


@cache
def match_stack(framework: str) -> Stack:
    """Return the stack that a framework's name means; ``DEFAULT`` for an unknown one."""
    text = framework.lower()
    return next((stack for words, stack in _CALLED.items() if re.search(words, text)), DEFAULT)
