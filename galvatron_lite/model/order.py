"""Series-parallel decomposition of a partial order. Works on names, without torch.

A partial order is a series of *groups*: components of "neither reaches the other". Each element of a group reaches each
element of the next group. A group of more than one element consists of independent *parts*: components of "one reaches
the other". Elements are numbered along a topological order, and sets of them are the bits of an integer, so that a
thousand layers take milliseconds.
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
    related: tuple[int, ...]  # for each element itself and those that reach it or that it reaches, as bits
    after: tuple[int, ...]  # for each element those that it reaches, as bits

    def groups(self, inside: int) -> list[int]:
        """The groups of a set of elements, in order."""
        return self._components(inside, [inside & ~row for row in self.related])

    def parts(self, group: int) -> list[int]:
        """The independent parts of a group, by first element."""
        return self._components(group, [group & row for row in self.related])

    def regions(self, inside: int, ties: Sequence[int] = ()) -> Iterator[list[int]]:
        """Yield the parts, two or more, of each group of a set; if ties leave less than two, those inside each part.

        Args:
            inside: the set.
            ties: sets of elements that must stay together: their parts count as one, and parts that are tied to
                elements outside of their group do not count.
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
    """Return the partial order of a directed graph without cycles: an element reaches those that paths lead to."""
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
