"""The strategy of every layer of a model for one of the oracle's words, or for a text. No torch here.

A layer that cannot be split so many ways is split as far as it can be; the rest of its group takes samples of its own,
and where the batch has too few for that, every device of the group works through all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, Recompute
from galvatron_lite.oracle.case import Kind
from galvatron_lite.parallelism.strategy import Offload, Strategy, Strided
from galvatron_lite.search.strategies import Narrowed, strategies_for

_PLAIN: dict[str, tuple[object, ...]] = {
    "zero": (1,),
    "zero_stage": (0,),
    "tensor": (1,),
    "sequence_parallel": (False,),
    "recompute": (Recompute.NONE,),
    "context": (1,),
    "expert": (1,),
    "expert_tensor": (0,),
    "ulysses": (False,),
    "offload": (Offload.NONE,),
    "strided": (Strided.NONE,),
}
_PIXELS = ("depth", "height", "width")
SLICES = {Kind.FILTER: "filters", Kind.DATA_FILTER: "filters", Kind.CHANNEL: "channels"}
"""Fields of ``Strategy`` by the oracle's words for sharing channels."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What one kind of layer does.

    Attributes:
        strategy: over all devices.
        alike: devices of its group that all do the same work; 1 where each has work of its own.
    """

    strategy: Strategy
    alike: int = 1


def degree_of(kind: Kind, strategy: Strategy) -> int:
    """Ways that a strategy splits a layer as the oracle's word says."""
    return strategy.slices if kind in SLICES else strategy.spatial


def options(layer: LayerKind, kind: Kind, group: int, batch: int) -> list[Strategy]:
    """Strategies of a group for a kind of layer, those first that split it most ways; none where the batch is small.

    Args:
        layer: kind of layer.
        kind: the oracle's word.
        group: devices.
        batch: samples of the group.
    """
    wanted = dict(_PLAIN)
    own = (SLICES[kind],) if kind in SLICES else _PIXELS
    wanted |= {name: (1,) for name in ("filters", "channels", *_PIXELS) if name not in own}
    found = strategies_for(layer, group, narrowed=Narrowed(wanted))
    legal = [one for one in found if batch % one.data == 0]
    most = max((degree_of(kind, one) for one in legal), default=0)
    return [one for one in legal if degree_of(kind, one) == most]


def inside(layer: LayerKind, outer: Strategy, own: Strategy) -> Strategy:
    """A group's strategy within the replicas, shards and recomputation of another, where the layer offers that."""
    again = outer.recompute if outer.recompute in layer.kept else Recompute.NONE
    return replace(own, data=own.data * outer.data, zero=outer.zero, zero_stage=outer.zero_stage, recompute=again)


def eased(layer: LayerKind, strategy: Strategy) -> Strategy | None:
    """The strategy, where the layer allows it; else without what edges of a model do without; None where neither."""
    plain_tokens, kept = {"sequence_parallel": False}, {"recompute": Recompute.NONE}
    for changes in ({}, kept, plain_tokens, kept | plain_tokens):
        easier = replace(strategy, **changes)
        if legal(layer, easier):
            return easier
    return None


def legal(layer: LayerKind, strategy: Strategy) -> bool:
    """Whether a kind of layer can be split as a strategy says; how many replicas there are does not matter."""
    inner = replace(strategy, data=1)
    values: dict[str, tuple[object, ...]] = {item.name: (getattr(inner, item.name),) for item in fields(inner)}
    return inner in strategies_for(layer, inner.devices, narrowed=Narrowed(values))


def family_of(strategy: Strategy) -> Kind | None:
    """The oracle's word for how a strategy splits convolutions; None where it does not."""
    if strategy.spatial > 1:
        return Kind.SPATIAL
    if strategy.slices > 1:
        return Kind.FILTER if strategy.filters > 1 else Kind.CHANNEL
    return None


def plain(strategy: Strategy) -> Strategy:
    """The strategy with replicas in place of the devices that share convolutions."""
    shared = strategy.spatial * strategy.slices
    return replace(strategy, data=strategy.data * shared, depth=1, height=1, width=1, filters=1, channels=1)


def check_text(strategy: Strategy, kinds: Mapping[str, LayerKind]) -> None:
    """Whether any layer of a model can be split as a strategy says.

    Raises:
        InputError: none can; says what its layers allow.
    """
    if any(eased(kind, strategy) for kind in kinds.values()):
        return
    ways = {name: allowed(kind) for name, kind in kinds.items()}
    said = "; ".join(f"{name}: {found}" for name, found in ways.items() if found)
    raise InputError("--strategy", str(strategy), f"No layer can be split so. They allow {said or 'no such split'}.")


def allowed(layer: LayerKind) -> str:
    """The most ways that a kind of layer can be split, for people; empty where it cannot be."""
    found = dict.fromkeys(("tensor", "height", "width", "filters", "channels"), 1)
    for group in (2, 3, 4, 8, 16, 32, 64):
        for one in strategies_for(layer, group, narrowed=Narrowed({**_PLAIN, "tensor": (1, group), "data": (1,)})):
            found = {name: max(most, getattr(one, name)) for name, most in found.items()}
    return ", ".join(f"{name} up to {most}" for name, most in found.items() if most > 1)
