"""Keys that people write, held against those there are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from galvatron_lite.errors import InputError

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
    """``Did you mean X?`` after a space, or what there is."""
    close = [OTHER_WORDS.get(key, "")] if OTHER_WORDS.get(key) in keys else get_close_matches(key, keys, 1)
    return f" Did you mean {close[0]}?" if close else f" Known: {', '.join(sorted(keys))}."
