"""Parameters that layers share: what that means for each layer, given which stage holds which layers."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from galvatron_lite.cost.layer import ParameterSharing
from galvatron_lite.model.graph import ModelGraph, Tie


def sharing_of(graph: ModelGraph, inside: Container[int]) -> dict[int, ParameterSharing]:
    """What sharing means for the layers of one stage; layers that share nothing are absent.

    Args:
        graph: the model.
        inside: places of the stage's layers; with virtual stages, of all layers of its devices.
    """
    if not graph.ties:
        return {}
    place = {layer.name: index for index, layer in enumerate(graph.layers)}
    result: dict[int, ParameterSharing] = {}
    for tie in graph.ties:
        for index in (place[tie.first], place[tie.second]):
            if index in inside:
                result[index] = _joined(result.get(index, ParameterSharing()), tie, place, index, inside)
    return result


def _joined(
    sharing: ParameterSharing, tie: Tie, place: dict[str, int], index: int, inside: Container[int]
) -> ParameterSharing:
    first, second = place[tie.first], place[tie.second]
    if first in inside and second in inside:
        owns = index == first and tie.parameters > 0
        return replace(sharing, grouped=sharing.grouped or owns)
    copies = index == second
    return replace(
        sharing,
        copied=sharing.copied + tie.parameters * copies,
        frozen=sharing.frozen + tie.frozen * copies,
        exchanged=sharing.exchanged + tie.parameters - tie.frozen,
    )


def tied_groups(graph: ModelGraph) -> tuple[tuple[int, ...], ...]:
    """Places of layers that share parameters, directly or through others: each group has one strategy."""
    place = {layer.name: index for index, layer in enumerate(graph.layers)}
    groups: list[set[int]] = []
    for tie in graph.ties:
        joined = {place[tie.first], place[tie.second]}
        apart = [group for group in groups if not group & joined]
        groups = [*apart, joined.union(*(group for group in groups if group & joined))]
    return tuple(sorted(tuple(sorted(group)) for group in groups))
