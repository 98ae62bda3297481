"""How long a training step takes in steady state: the programme's own table, walked through as events. No torch here.

Every process runs its passes in the order of its programme, each as soon as the one before it is done and the messages
it waits for have come. A message leaves when its pass is done and the message before it from the same process has
arrived, beside whatever its process computes. The table repeats itself from training step to training step, so the
ends of passes grow by a constant for each (Baccelli et al. 1992, "Synchronization and Linearity", theorem 3.109): the
seconds of a step. Under ``stages`` the processes of a stage take turns; what a message between two stages takes must
not depend on which of them send it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from galvatron_lite.parallelism.cyclic.messages import CyclicMessage, CyclicPass
from galvatron_lite.parallelism.cyclic.programme import CyclicProgramme
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting
from galvatron_lite.parallelism.cyclic.timeline import StagePass

STEADY = 3
"""The first training step whose passes are those of any later one: updates come to their last users two steps after."""
LOOKED = 4
"""Training steps before a round that its passes may wait for something of, and more."""
_REPEATS, _SAME = 4, 1e-9
_ROUNDS = 8
"""Rounds a worker after which the mean growth of the second half is taken where ends have not settled."""

Awaited = tuple[int, int]
"""Number in a round, and how many rounds ago."""


@dataclass(frozen=True, slots=True)
class CyclicSlot:
    """A pass, as it comes once in every round of 2N time steps."""

    process: int  # that runs it (in the round that was looked at)
    does: CyclicPass  # the pass
    after: Awaited | None  # the pass before it on its process
    receives: tuple[Awaited, ...]  # messages it waits for, by their numbers
    sends: tuple[int, ...]  # its messages: their numbers in the round


@dataclass(frozen=True, slots=True)
class Loop:
    """What is done over and over: each stage forward and backward by each worker once."""

    slots: tuple[CyclicSlot, ...]  # in an order in which each comes after all it waits for
    messages: tuple[CyclicMessage, ...]  # that the slots send
    behind: tuple[Awaited | None, ...]  # of each message, the one before it from the same process; None: there is none


@lru_cache(maxsize=1)
def steady_passes(programme: CyclicProgramme) -> tuple[tuple[int, CyclicPass], ...]:
    """Every pass of some training steps from the first steady one on, with its process."""
    return programme.all_passes(range(STEADY, STEADY + LOOKED + 1))


@lru_cache(maxsize=16)
def loop_of(rule: CyclicRule, setting: CyclicSetting, workers: int) -> Loop:
    """The loop of a programme in steady state."""
    table = _Table(CyclicProgramme(rule, setting, workers), STEADY + LOOKED)
    slots = tuple(table.slot(number) for number in table.inside)
    messages = tuple(message for number in table.inside for message in table.every[number][1].sends)
    behind = tuple(table.message_before(message) for message in messages)
    return Loop(slots, messages, behind)


class _Table:
    """The passes of some training steps, and of what those in the last whole round wait for."""

    def __init__(self, programme: CyclicProgramme, last: int) -> None:
        self.every = steady_passes(programme)
        self._turn, self._last = 2 * programme.workers, last
        self.inside = [number for number in range(len(self.every)) if self._round(number) == last]
        self._slots = {_name(self.every[number][1].moment): slot for slot, number in enumerate(self.inside)}
        counts = [len(self.every[number][1].sends) for number in self.inside]
        self._first = [0, *accumulate(counts)]
        self._before: list[int | None] = []
        self._sent: dict[CyclicMessage, tuple[int, int]] = {}
        self._message_before: dict[CyclicMessage, CyclicMessage | None] = {}
        self._fill()

    def _fill(self) -> None:
        ran, sent = dict[int, int](), dict[int, CyclicMessage]()
        for number, (process, one) in enumerate(self.every):
            self._before.append(ran.get(process))
            ran[process] = number
            for index, message in enumerate(one.sends):
                self._message_before[message] = sent.get(process)
                sent[process], self._sent[message] = message, (number, index)

    def _round(self, number: int) -> int:
        return self.every[number][1].moment.time // self._turn

    def _pass_at(self, number: int) -> Awaited:
        return self._slots[_name(self.every[number][1].moment)], self._last - self._round(number)

    def _message_at(self, message: CyclicMessage) -> Awaited:
        number, index = self._sent[message]
        slot, ago = self._pass_at(number)
        return self._first[slot] + index, ago

    def slot(self, number: int) -> CyclicSlot:
        """A pass of the last round."""
        process, one = self.every[number]
        before, (slot, _) = self._before[number], self._pass_at(number)
        return CyclicSlot(
            process,
            one,
            None if before is None else self._pass_at(before),
            tuple(self._message_at(message) for message in one.receives),
            tuple(range(self._first[slot], self._first[slot + 1])),
        )

    def message_before(self, message: CyclicMessage) -> Awaited | None:
        """The message that the same process sent before."""
        other = self._message_before[message]
        return None if other is None else self._message_at(other)


def _name(moment: StagePass) -> tuple[int, int, bool]:
    return moment.worker, moment.stage, moment.backward


def round_seconds(loop: Loop, passes: Sequence[float], messages: Sequence[float]) -> float:
    """Seconds of a training step in steady state.

    Args:
        loop: of the programme.
        passes: of each slot, on its process.
        messages: of each message, from the end of its pass to its arrival with the link to itself.
    """
    ends: list[list[float]] = []
    arrivals: list[list[float]] = []
    most = _ROUNDS * len({slot.does.moment.worker for slot in loop.slots}) + _ROUNDS
    for number in range(most):
        _round(loop, passes, messages, ends, arrivals)
        for repeat in range(1, min(_REPEATS, number // 2) + 1):
            pace = _pace(ends, repeat)
            if pace is not None:
                return pace
    half = most // 2
    return max(new - old for new, old in zip(ends[-1], ends[half - 1], strict=True)) / (most - half)


def _pace(ends: Sequence[Sequence[float]], repeat: int) -> float | None:
    """What a round takes once all ends grow alike over ``repeat`` rounds, twice in a row; None while they do not."""
    new, old, first = ends[-1], ends[-1 - repeat], ends[-1 - 2 * repeat]
    grown = new[0] - old[0]
    room = _SAME * grown
    alike = all(
        abs(a - b - grown) <= room and abs(b - c - grown) <= room for a, b, c in zip(new, old, first, strict=True)
    )
    return grown / repeat if alike else None


def _round(
    loop: Loop,
    passes: Sequence[float],
    messages: Sequence[float],
    ends: list[list[float]],
    arrivals: list[list[float]],
) -> None:
    """One more round."""
    ends.append([0.0] * len(loop.slots))
    arrivals.append([0.0] * len(loop.messages))
    for number, slot in enumerate(loop.slots):
        start = 0.0 if slot.after is None else _past_figure(ends, slot.after)
        for awaited in slot.receives:
            start = max(start, _past_figure(arrivals, awaited))
        end = start + passes[number]
        ends[-1][number] = end
        for message in slot.sends:
            behind = loop.behind[message]
            free = end if behind is None else max(end, _past_figure(arrivals, behind))
            arrivals[-1][message] = free + messages[message]


def _past_figure(figures: list[list[float]], awaited: Awaited) -> float:
    """What was found so many rounds ago; 0 before the first."""
    number, ago = awaited
    return figures[-1 - ago][number] if ago < len(figures) else 0.0
