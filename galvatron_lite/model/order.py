"""Independent parts of a partial order: what has no path between it and what runs beside it. Names only, no torch.

Elements are numbered along a topological order; sets of them are the bits of a whole number, so that a thousand layers
take milliseconds.

A partial order falls into *groups* that come one after the other: components of "neither reaches the other". Every
element of a group reaches every element of the next one. A group of more than one element falls into *parts* that run
beside each other: components of "one reaches the other". This is the series-parallel decomposition of the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import networkx


@dataclass(frozen=True, slots=True)
class Order:
    """A partial order."""

    names: tuple[str, ...]  # of the elements, in a topological order
    related: tuple[int, ...]  # per element the elements that reach it or that it reaches, itself among them, as bits
    after: tuple[int, ...]  # per element those that it reaches, as bits

    def groups(self, inside: int) -> list[int]:
        """The groups of a set of elements, in order."""
        return self._components(inside, [inside & ~row for row in self.related])

    def parts(self, group: int) -> list[int]:
        """What runs beside each other in a group, by first element."""
        return self._components(group, [group & row for row in self.related])

    def regions(self, inside: int, ties: Sequence[int] = ()) -> Iterator[list[int]]:
        """The parts, two or more, that each group of a set falls into, in order; of a part where a group does not.

        Args:
            inside: the set.
            ties: sets of elements that must not be apart: their parts count as one; parts that are tied to what is
                outside of their group count as none.
        """
        for group in self.groups(inside):
            parts = self.parts(group)
            joined = list(parts)
            for tie in ties:
                apart = [part for part in joined if not part & tie]
                joined = [*apart, sum(part for part in joined if part & tie)] if tie & group else joined
            free = [part for part in joined if not any(part & tie and tie & ~group for tie in ties)]
            if len(free) > 1:
                yield sorted(free, key=lambda part: part & -part)  # by first element
            elif len(parts) > 1:
                for part in parts:
                    yield from self.regions(part, ties)

    def _components(self, inside: int, rows: Sequence[int]) -> list[int]:
        components = []
        while inside:
            component = waiting = inside & -inside
            while waiting:
                lowest = waiting & -waiting
                fresh = rows[lowest.bit_length() - 1] & ~component
                component |= fresh
                waiting = (waiting ^ lowest) | fresh
            components.append(component)
            inside &= ~component
        return components


def order_of(graph: networkx.DiGraph[str]) -> Order:
    """The partial order of a directed graph without cycles: an element reaches another where a path leads there."""
    rank = {name: number for number, name in enumerate(graph)}
    import networkx  # here, as most models have no branches and it takes long to load

    names = tuple(networkx.lexicographical_topological_sort(graph, key=rank.__getitem__))
    place = {name: number for number, name in enumerate(names)}
    after, before = [0] * len(names), [0] * len(names)
    for number in reversed(range(len(names))):
        for following in graph.successors(names[number]):
            after[number] |= after[place[following]] | 1 << place[following]
    for number in range(len(names)):
        for earlier in graph.predecessors(names[number]):
            before[number] |= before[place[earlier]] | 1 << place[earlier]
    related = tuple(1 << n | a | b for n, (a, b) in enumerate(zip(after, before, strict=True)))
    return Order(names, related, tuple(after))


def bits(elements: int) -> Iterator[int]:
    """The numbers of a set's elements, from the smallest."""
    while elements:
        lowest = elements & -elements
        yield lowest.bit_length() - 1
        elements ^= lowest
