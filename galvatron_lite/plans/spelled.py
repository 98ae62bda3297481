"""Words of a plan file that somebody edited: keys that there are, strategies in short form."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import to_data
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.keys import check_keys
from galvatron_lite.plans.schema import BranchPlacement, LayerRun, Plan, Stage
from galvatron_lite.plans.strategy_text import parse_strategy


def spelled_out(data: Mapping[str, Any], field: str) -> dict[str, Any]:
    """The plain data of a whole plan, its strategies spelled out where they are written in short form."""
    try:
        parts = {"stages": Stage, "branches": BranchPlacement}
        _check(data, Plan, f"{field}, ", parts)
        return dict(data) | {
            name: [_part(one, kind, f"{field}, {name}.{number}") for number, one in enumerate(data[name])]
            for name, kind in parts.items()
            if isinstance(data.get(name), list)
        }
    except FileFormatError:
        raise
    except InputError as error:
        raise FileFormatError(error.field, error.value, error.remedy) from error


def _check(data: Mapping[str, Any], kind: type, field: str, lists: Collection[str] = ()) -> None:
    check_keys(data, [one.name for one in fields(kind)], (), field, lists)


def _part(data: Any, kind: type, field: str) -> Any:
    """A stage or a branch; what is no mapping is left for the schema to refuse."""
    if not isinstance(data, Mapping):
        return data
    _check(data, kind, f"{field}.")
    if not isinstance(data.get("runs"), list):
        return data
    return dict(data) | {"runs": [_run(one, f"{field}.runs.{number}") for number, one in enumerate(data["runs"])]}


def _run(data: Any, field: str) -> Any:
    if not isinstance(data, Mapping):
        return data
    _check(data, LayerRun, f"{field}.")
    strategy = data.get("strategy")
    if isinstance(strategy, Mapping):
        _check(strategy, Strategy, f"{field}.strategy.")
    if isinstance(strategy, str):
        return dict(data) | {"strategy": to_data(parse_strategy(strategy, f"{field}.strategy"))}
    return data
