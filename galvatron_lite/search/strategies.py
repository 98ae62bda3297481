"""Every strategy of a kind of layer on a stage, built from the divisors of its devices. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from galvatron_lite.model.graph import LayerKind
from galvatron_lite.parallelism.base import Dimension, Room
from galvatron_lite.parallelism.registry import choosing
from galvatron_lite.parallelism.strategy import ADDED, Strategy, strategy_of

Option = Mapping[str, object]
_PLAIN: dict[str, Any] = {item.name: item.default for item in fields(Strategy)}
_LAST = [dimension for dimension in choosing() if dimension.degree][-1]


@dataclass(frozen=True, slots=True)
class Narrowed:
    """Values that fields of ``Strategy`` are limited to."""

    # by field; a field that is absent may have any
    values: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    def keeps(self, option: Option) -> bool:
        """Whether an option of a dimension has none but wanted values."""
        return all(name not in self.values or value in self.values[name] for name, value in option.items())


EVERYTHING = Narrowed()


def strategies_for(
    kind: LayerKind,
    devices: int,
    node_devices: int | None = None,
    *,
    tokens: int = 1,
    narrowed: Narrowed = EVERYTHING,
) -> tuple[Strategy, ...]:
    """Every strategy of a kind of layer on a stage, in a fixed order.

    Args:
        kind: of layer.
        devices: of the stage, all of them taken.
        node_devices: devices in a node, to leave out what is not in the declared space (``search.space``); None: every
            legal strategy.
        tokens: the fewest tokens of a sample that are worth a device of its own.
        narrowed: what fields may be.
    """
    room = Room(devices, node_devices, tokens)
    partial: list[tuple[dict[str, Any], int]] = [({**_PLAIN, **dict.fromkeys(ADDED, 1)}, devices)]
    for dimension in choosing():
        options = [option for option in dimension.choices(kind, devices) if narrowed.keeps(option)]
        partial = _widened(partial, options, dimension, kind, room)
    if ADDED:
        return tuple(strategy_of(chosen) for chosen, _ in partial)
    return tuple(Strategy(*chosen.values()) for chosen, _ in partial)  # in the order of its fields, as ``_PLAIN`` is


def _widened(
    partial: list[tuple[dict[str, Any], int]],
    options: Sequence[Option],
    dimension: Dimension,
    kind: LayerKind,
    room: Room,
) -> list[tuple[dict[str, Any], int]]:
    """What is chosen so far, and the devices it leaves, with every option that may stand beside it."""
    by_degree: dict[int, list[Option]] = {}
    for option in options:
        by_degree.setdefault(int(option[dimension.degree]) if dimension.degree else 1, []).append(option)  # type: ignore[call-overload]
    wider: list[tuple[dict[str, Any], int]] = []
    for chosen, left in partial:
        degrees = [left] if dimension is _LAST else [degree for degree in by_degree if left % degree == 0]
        for degree in degrees:
            for option in by_degree.get(degree, ()):
                both = {**chosen, **option}
                if dimension.allows(kind, both, room):
                    wider.append((both, left // degree))
    return wider
