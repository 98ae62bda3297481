"""Words of a plan file that somebody edited: its keys, and strategies (``zero3x8 tensor2+sp recompute``)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from galvatron_lite.errors import FileFormatError, InputError, suggestion
from galvatron_lite.files import to_data
from galvatron_lite.parallelism.registry import UNSPLIT, fields_in, pinned
from galvatron_lite.parallelism.strategy import Strategy, strategy_of
from galvatron_lite.plans.schema import BranchPlacement, LayerRun, Plan, Stage


def parse_strategy(text: str, field: str = "strategy") -> Strategy:
    """A strategy from its short form."""
    chosen: dict[str, object] = {}
    for word in text.split():
        fields = fields_in(word)
        if fields is None or fields.keys() & chosen.keys():
            raise InputError(field, word if fields is None else text, _remedy())
        chosen |= fields
    if not text.split():
        raise InputError(field, text, _remedy())
    return strategy_of(chosen)


def _remedy() -> str:
    examples = (one.examples or f"{one.degree}2" for one in pinned())
    return f"Write parts such as {', '.join(examples)}; or {UNSPLIT}."


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
    hint = suggestion(key, keys, {word: ours for word, ours in OTHER_WORDS.items() if ours in keys})
    return f" {hint}" if hint else f" Known: {', '.join(sorted(keys))}."


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
