"""Words of a plan file that somebody edited: its keys, and strategies (``zero3x8 tensor2+sp recompute``)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import to_data
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import ADDED, Offload, Strategy, strategy_of
from galvatron_lite.plans.schema import BranchPlacement, LayerRun, Plan, Stage

REMEDY = (
    "Write parts such as data4, zero3x8 (stage 3 over 8), zero3 (over ranks of context or pixels alone), tensor2, "
    "tensor2+sp, context2, ulysses2, expert4, expert4-whole, spatial2x4 (rows x columns; spatial2x2x4: planes x rows "
    "x columns), filters2, channels2, "
    "recompute, selective, offload, offload-states, offload-activations; or unsplit."
)
_DEGREE = re.compile(r"^(data|tensor|context|ulysses|expert|filters|channels)([1-9]\d*)(\+sp)?$")
_WHOLE_EXPERTS = re.compile(r"^expert([1-9]\d*)-whole$")
_SPATIAL = re.compile(r"^spatial(?:([1-9]\d*)x)?([1-9]\d*)x([1-9]\d*)$")
_ZERO = re.compile(r"^zero([123])(?:x([1-9]\d*))?$")
_FIXED: dict[str, dict[str, object]] = {
    "unsplit": {},
    "whole": {},  # as it was written before
    "recompute": {"recompute": Recompute.FULL},
    "selective": {"recompute": Recompute.SELECTIVE},
    "offload": {"offload": Offload.ALL},
    "offload-states": {"offload": Offload.STATES},
    "offload-activations": {"offload": Offload.ACTIVATIONS},
}


def parse_strategy(text: str, field: str = "strategy") -> Strategy:
    """A strategy from its short form."""
    chosen: dict[str, object] = {}
    for word in text.split():
        fields = _fields(word)
        if fields is None or fields.keys() & chosen.keys():
            raise InputError(field, word if fields is None else text, REMEDY)
        chosen |= fields
    if not text.split():
        raise InputError(field, text, REMEDY)
    return strategy_of(chosen)


def _fields(word: str) -> dict[str, object] | None:
    """Fields of ``Strategy`` that a word sets; None for a word that says nothing."""
    if word in _FIXED:
        return _FIXED[word]
    sharded = _ZERO.match(word)
    if sharded:
        return {"zero": int(sharded[2] or 1), "zero_stage": int(sharded[1])}
    grid = _SPATIAL.match(word)
    if grid:
        return {"depth": int(grid[1] or 1), "height": int(grid[2]), "width": int(grid[3])}
    spread = _WHOLE_EXPERTS.match(word)
    if spread:
        return {"expert": int(spread[1]), "expert_tensor": 1}
    name = word.rstrip("0123456789")
    if name in ADDED and word[len(name) :].lstrip("0") == word[len(name) :] != "":
        return {name: int(word[len(name) :])}
    found = _DEGREE.match(word)
    if not found or (found[3] and found[1] != "tensor"):
        return None
    degree = int(found[2])
    if found[1] == "ulysses":
        return {"context": degree, "ulysses": True}
    fields: dict[str, object] = {found[1]: degree}
    return fields | {"sequence_parallel": True} if found[3] else fields


OTHER_WORDS = {
    "batch": "global_batch", "batch_size": "global_batch", "global_batch_size": "global_batch", "gpus": "devices",
    "world_size": "devices", "chunks": "microbatches", "gradient_accumulation": "microbatches",
    "tp": "tensor", "sp": "sequence_parallel", "cp": "context", "dp": "data", "ep": "expert",
}  # fmt: skip
"""What others call our keys."""


def check_keys(
    data: Mapping[str, Any], keys: Collection[str], needed: Sequence[str], field: str, lists: Collection[str] = ()
) -> None:
    """Whether a mapping has all keys that it needs and no others.

    Args:
        data: what was written.
        keys: keys it may have.
        needed: those it must have.
        field: what to name in an error, with what joins it to a key.
        lists: keys whose values must be lists; they are only told of where a key is unknown, as what belongs to one
            of them may then stand under that key.
    """
    missing = [key for key in needed if key not in data]
    unknown = next((key for key in data if key not in keys), None)
    if unknown is not None:
        lacks = f" {_listed(missing)} missing." if missing else ""
        lacks += "".join(f" Nor can {key}: {data[key]!r} be used: a list is needed." for key in _no_lists(data, lists))
        remedy = f"There is no such key.{_meant(str(unknown), keys)}{lacks}"
        if isinstance(data[unknown], list | Mapping):  # no value to show
            raise InputError(field.rstrip("., ") or "key", str(unknown), remedy)
        raise InputError(f"{field}{unknown}", data[unknown], remedy)
    if missing:
        raise InputError(f"{field}{missing[0]}", None, f"Needed are {', '.join(needed)}.")


def _no_lists(data: Mapping[str, Any], lists: Collection[str]) -> list[str]:
    """Keys whose values should be lists and are a text or a number."""
    return [key for key in lists if isinstance(data.get(key), str | int | float)]


def _listed(names: Sequence[str]) -> str:
    return f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'}"


def _meant(key: str, keys: Collection[str]) -> str:
    close = [OTHER_WORDS.get(key, "")] if OTHER_WORDS.get(key) in keys else get_close_matches(key, keys, 1)
    return f" Did you mean {close[0]}?" if close else f" Known: {', '.join(sorted(keys))}."


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
