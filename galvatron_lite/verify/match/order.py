"""Whether any order of the messages lets every rank go on, told from roles alone where that is enough.

A message that several ranks give is one event. It happens once all of them have come to it; a rank comes to what
follows once all that it waited for before has happened. Where no event waits for itself along some way, nobody waits
for ever. Events of groups in which the same roles stand at the same places count as one: a circle in the world is then
a circle here, so that none here is none there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from galvatron_lite.verify.match.agree import Cast
from galvatron_lite.verify.match.places import PAIRED, Part, Stream
from galvatron_lite.verify.schema import NOBODY, Kind

Event = tuple[Hashable, ...]


def flows(parts: Mapping[int, Part], casts: Mapping[Stream, Cast], *, in_order: bool) -> bool:
    """Whether it is sure that every rank comes to its end; all messages must fit.

    Args:
        parts: by rank.
        casts: of all groups.
        in_order: see ``match``.
    """
    graph, told = _Graph(), {cast: number for number, cast in enumerate(dict.fromkeys(casts.values()))}
    classes: dict[Hashable, tuple[Part, list[int]]] = {}
    for part in parts.values():
        own = [told[casts[stream]] for stream in part.streams if stream is not None]
        classes[part.script.number, tuple(own), tuple(part.shifts[line] for line in part.script.paired)] = part, own
    for part, own in classes.values():
        _add(graph, part, own, in_order=in_order)
    return graph.ends()


@dataclass(slots=True)
class _Graph:
    numbers: dict[Event, int] = field(default_factory=dict)
    after: list[list[int]] = field(default_factory=list)
    before: list[int] = field(default_factory=list)

    def event(self, event: Event) -> int:
        """Its number."""
        found = self.numbers.get(event)
        if found is None:
            found = self.numbers[event] = self.point()
        return found

    def point(self) -> int:
        """A moment of a rank: a new number."""
        self.after.append([])
        self.before.append(0)
        return len(self.after) - 1

    def follows(self, first: int, second: int) -> None:
        """The second waits for the first."""
        self.after[first].append(second)
        self.before[second] += 1

    def ends(self) -> bool:
        """Whether nothing waits for itself (Kahn 1962)."""
        before = list(self.before)
        free = [number for number, count in enumerate(before) if not count]
        done = 0
        while free:
            done += 1
            for number in self.after[free.pop()]:
                before[number] -= 1
                if not before[number]:
                    free.append(number)
        return done == len(before)


def _add(graph: _Graph, part: Part, casts: Sequence[int], *, in_order: bool) -> None:
    """What one rank does, given the numbers of its groups' casts: moments, and events between them."""
    events, lanes = _Events(part, casts), _Lanes(graph)
    waited: dict[int, list[int]] = defaultdict(list)
    now = graph.point()
    for number, message in enumerate(part.script.messages):
        if number in waited:
            last, now = now, graph.point()
            for one in (last, *waited.pop(number)):
                graph.follows(one, now)
        event = graph.event(events.of(number))
        graph.follows(now, event)
        if in_order:
            lanes.put(event, lane_of(part, number), part.script.batches[number])
        if message.waited != NOBODY:
            waited[message.waited].append(event)


def lane_of(part: Part, number: int) -> Hashable:
    """Messages of a rank that go one after the other: those of a group, but for single ones from rank to rank, which go
    in order with those of the same partner only."""
    script, line = part.script, part.script.lines[number]
    alone = script.messages[number].kind in PAIRED and script.batches[number] == NOBODY
    return line, part.partner(number) if alone else -1


@dataclass(slots=True)
class _Lanes:
    graph: _Graph
    last: dict[Hashable, list[int]] = field(default_factory=dict)
    before: dict[Hashable, list[int]] = field(default_factory=dict)
    batch: dict[Hashable, int] = field(default_factory=dict)

    def put(self, event: int, lane: Hashable, together: int) -> None:
        """An event, behind those of its lane that are not of its batch."""
        if together == NOBODY or self.batch.get(lane) != together:
            self.before[lane], self.last[lane] = self.last.get(lane, []), []
            self.batch[lane] = together
        self.last[lane].append(event)
        for one in self.before[lane]:
            self.graph.follows(one, event)


@dataclass(slots=True)
class _Events:
    part: Part
    casts: Sequence[int]
    counts: dict[Hashable, int] = field(default_factory=lambda: defaultdict(int))

    def of(self, number: int) -> Event:
        """The event that a message of the rank is part of."""
        part, message = self.part, self.part.script.messages[number]
        line = part.script.lines[number]
        way: Hashable = None
        if message.kind in PAIRED:
            stream = part.streams[line]
            assert stream is not None
            own, other = stream[1].index(part.rank), part.partner(number)
            way = (*((own, other) if message.kind is Kind.SEND else (other, own)), message.tag)
        self.counts[line, way] += 1
        return self.casts[line], way, self.counts[line, way]
