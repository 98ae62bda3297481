"""Strategies as people write them: ``zero3x8 tensor2+sp recompute``. The inverse of ``str(strategy)``."""

from __future__ import annotations

import re

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Offload, Strategy, Strided

REMEDY = (
    "Write parts such as data4, zero3x8 (stage 3 over 8), zero3 (over ranks of context or pixels alone), tensor2, "
    "tensor2+sp, context2, ulysses2, expert4, expert4-whole, spatial2x4 (rows x columns; spatial2x2x4: planes x rows "
    "x columns), filters2, channels2, "
    "zero-strided, context-strided, recompute, selective, offload, offload-states, offload-activations; or whole."
)
_DEGREE = re.compile(r"^(data|tensor|context|ulysses|expert|filters|channels)([1-9]\d*)(\+sp)?$")
_WHOLE_EXPERTS = re.compile(r"^expert([1-9]\d*)-whole$")
_SPATIAL = re.compile(r"^spatial(?:([1-9]\d*)x)?([1-9]\d*)x([1-9]\d*)$")
_ZERO = re.compile(r"^zero([123])(?:x([1-9]\d*))?$")
_FIXED: dict[str, dict[str, object]] = {
    "whole": {},
    "recompute": {"recompute": Recompute.FULL},
    "selective": {"recompute": Recompute.SELECTIVE},
    "context-strided": {"strided": Strided.CONTEXT},
    "zero-strided": {"strided": Strided.ZERO},
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
    return Strategy(**chosen)  # type: ignore[arg-type]


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
    found = _DEGREE.match(word)
    if not found or (found[3] and found[1] != "tensor"):
        return None
    degree = int(found[2])
    if found[1] == "ulysses":
        return {"context": degree, "ulysses": True}
    fields: dict[str, object] = {found[1]: degree}
    return fields | {"sequence_parallel": True} if found[3] else fields
