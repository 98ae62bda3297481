"""Whether what the ranks of a group say to one another fits, looked at once for groups of the same roles.

What two groups do is the same where the same roles stand in the same places. Messages of a group are numbered: those of
all its ranks in their order, and those from one rank to another in theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from galvatron_lite.verify.match.places import PAIRED, Part, Script, Stream
from galvatron_lite.verify.match.rules import Spoken, collective_clash, pair_clash
from galvatron_lite.verify.schema import Kind

Member = tuple[int, int]
"""Number of a role, and of a group among those of its script."""
NOWHERE: Member = (-1, -1)
"""A rank that never says anything in the group."""
Cast = tuple[str, tuple[Member, ...]]
"""What a group is for, and who stands at its places."""
Way = tuple[int, int, int]
"""Places of sender and receiver in a group, and the tag."""


@dataclass(slots=True)
class Agreement:
    """What is known of casts, each looked at once."""

    scripts: Sequence[Script]  # of the roles, by number
    known: dict[Cast, bool] = field(default_factory=dict)  # by cast: whether its messages fit
    _collectives: dict[Member, list[int]] = field(default_factory=dict)

    def fits(self, stream: Stream, cast: Cast) -> bool:
        """Whether all that a group's ranks say to one another has an answer that fits."""
        if cast not in self.known:
            self.known[cast] = self._collectives_fit(stream, cast) and self._pairs_fit(stream, cast)
        return self.known[cast]

    def collectives(self, member: Member) -> list[int]:
        """Numbers of the collectives of a role on one of its groups."""
        if member not in self._collectives and member != NOWHERE:
            self._collectives[member] = list(_numbers(self.scripts[member[0]], member[1], paired=False))
        return self._collectives.get(member, [])

    def spoken(self, stream: Stream, member: Member, place: int, number: int) -> Spoken:
        """A message of the role at a place of a group."""
        script = self.scripts[member[0]]
        message, ranks = script.messages[number], script.groups[member[1]][1]
        shift = place - ranks.index(script.run.rank)
        return Spoken(stream[1][place], script.run.stage, message, script.places[number], shift == 0)

    def _collectives_fit(self, stream: Stream, cast: Cast) -> bool:
        numbers = [self.collectives(member) for member in cast[1]]
        if len({len(own) for own in numbers}) > 1:
            return False
        places = list({member: place for place, member in enumerate(cast[1])}.items())
        for count in range(len(numbers[0])):
            some = [self.spoken(stream, member, place, numbers[place][count]) for member, place in places]
            whole = some[0].message.kind is Kind.ALL_TO_ALL
            everyone = enumerate(cast[1]) if whole else ()
            all_places = [self.spoken(stream, member, place, numbers[place][count]) for place, member in everyone]
            if collective_clash(all_places or some) is not None:
                return False
        return True

    def _pairs_fit(self, stream: Stream, cast: Cast) -> bool:
        sent, taken = (self._ways(cast, kind) for kind in PAIRED)
        if {way: len(own) for way, own in sent.items()} != {way: len(own) for way, own in taken.items()}:
            return False
        for way, numbers in sent.items():
            for given, wanted in zip(numbers, taken[way], strict=True):
                pair = [
                    self.spoken(stream, cast[1][place], place, number)
                    for place, number in ((way[0], given), (way[1], wanted))
                ]
                if pair_clash(*pair) is not None:
                    return False
        return True

    def _ways(self, cast: Cast, kind: Kind) -> Mapping[Way, list[int]]:
        found: dict[Way, list[int]] = defaultdict(list)
        there = [(place, member) for place, member in enumerate(cast[1]) if member != NOWHERE]
        for place, member in there:
            script = self.scripts[member[0]]
            shift = place - script.groups[member[1]][1].index(script.run.rank)
            for number in _numbers(script, member[1], paired=True):
                message = script.messages[number]
                if message.kind is kind:
                    other = (script.places[number] + shift) % len(cast[1])
                    found[(*((place, other) if kind is Kind.SEND else (other, place)), message.tag)].append(number)
        return found


def _numbers(script: Script, line: int, *, paired: bool) -> Iterator[int]:
    return (
        number
        for number, own in enumerate(script.lines)
        if own == line and (script.messages[number].kind in PAIRED) == paired
    )


def casts_of(parts: Mapping[int, Part]) -> dict[Stream, Cast]:
    """Who stands at the places of every group."""
    lines: dict[Stream, dict[int, Member]] = defaultdict(dict)
    for rank, part in parts.items():
        for line, stream in enumerate(part.streams):
            if stream is not None:
                lines[stream][rank] = part.script.number, line
    return {
        stream: (stream[0], tuple(found.get(rank, NOWHERE) for rank in stream[1])) for stream, found in lines.items()
    }
