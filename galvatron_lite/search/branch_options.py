"""What each branch may do on each number of devices: the exact search of its own layers, as one stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.parallelism.branch.assign import Option
from galvatron_lite.parallelism.branch.find import Branch
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.search.best_first import search
from galvatron_lite.search.branch_course import BranchCourse, Strategies
from galvatron_lite.search.shapes import PriceCache, Request

_SMALL = 8
"""Devices up to which groups may have any size; of more, sizes that divide them."""

Choices = Mapping[int, Mapping[Option, Strategies]]
"""By devices of a group what a branch may do, and the strategies that it is."""


@dataclass(slots=True)
class BranchOptions:
    """Options of branches under one course; those of branches that are alike are searched once."""

    course: BranchCourse  # the number of micro-batches
    _known: dict[tuple[object, ...], Strategies | None] = field(default_factory=dict)
    _figures: dict[tuple[str, ...], PriceCache] = field(default_factory=dict)

    def of(self, branch: Branch, room: int, working: int, beside: int) -> Choices:
        """What a branch may do: the quickest within all of the room, and within an even share of it.

        Args:
            branch: of the model.
            room: bytes that the branches of a device may take.
            working: bytes of that which the trunk needs while it works.
            beside: branches that may share them.
        """
        found: dict[int, dict[Option, Strategies]] = {}
        for devices in self._sizes():
            ways = [self._searched(branch, devices, size) for size in (room, room // beside)]
            for strategies in (own for own in dict.fromkeys(ways) if own is not None):
                option = self.course.option(branch, devices, strategies, working)
                found.setdefault(devices, {})[option] = strategies
        return found

    def _sizes(self) -> list[int]:
        """Devices that a group may have; one at least is left to another group."""
        devices = self.course.request.devices
        sizes = range(1, devices) if devices <= _SMALL else divisors(devices)
        return [size for size in sizes if size < devices]

    def _searched(self, branch: Branch, devices: int, room: int) -> Strategies | None:
        """Strategies of a branch that take the least time within so many bytes; None where none fit."""
        if room < 1:
            return None
        request = self.course.of_branch(branch, devices, room)
        pins = tuple(request.fixed.pins_of(name) for name in branch.layers)
        key = (likeness(request.graph), pins, devices, room)
        if key not in self._known:
            figures = self._figures.setdefault(branch.layers, PriceCache())
            self._known[key] = self._solved(branch, replace(request, known=figures))
        return self._known[key]

    def _solved(self, branch: Branch, request: Request) -> Strategies | None:
        try:
            found = search(request, self.course.parts.of(branch.layers))
        except InputError:  # samples that its devices cannot share, or pins that leave it nothing
            return None
        if found is None:
            return None
        return tuple(strategy for stage in found.partition.stages for strategy in stage.strategies)


def likeness(graph: ModelGraph) -> tuple[object, ...]:
    """Equal for parts of equal layers between which the same goes."""
    place = {layer.name: number for number, layer in enumerate(graph.layers)}
    sent = tuple(
        (place[one.producer], tuple(place[name] for name in one.readers), one.size, one.borrowed)
        for one in graph.tensors
    )
    ties = tuple((place[tie.first], place[tie.second], tie.parameters) for tie in graph.ties)
    return tuple((layer.kind, layer.role) for layer in graph.layers), sent, ties
