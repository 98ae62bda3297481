"""How long a training step takes in steady state: the programme's own table, walked through as events.

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

from galvatron_lite.parallelism.cyclic.programme import CyclicMessage, CyclicPass, CyclicProgramme
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting

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
    does: CyclicPass
    after: Awaited | None  # the pass before it on its process
    receives: tuple[Awaited, ...]  # messages it waits for, by their numbers
    sends: tuple[int, ...]  # its messages: their numbers in the round


@dataclass(frozen=True, slots=True)
class Loop:
    """What is done over and over: each stage forward and backward by each worker once."""

    slots: tuple[CyclicSlot, ...]  # in an order in which each comes after all it waits for
    messages: tuple[CyclicMessage, ...]  # that the slots send
    behind: tuple[Awaited | None, ...]  # of each message, the one before it from the same process


@lru_cache(maxsize=1)
def steady_passes(programme: CyclicProgramme) -> tuple[tuple[int, CyclicPass], ...]:
    """Every pass of some training steps from the first steady one on, with its process."""
    return programme.all_passes(range(STEADY, STEADY + LOOKED + 1))


@lru_cache(maxsize=16)
def loop_of(rule: CyclicRule, setting: CyclicSetting, workers: int) -> Loop:
    """The loop of a programme in steady state."""
    every = steady_passes(CyclicProgramme(rule, setting, workers))
    rounds = [one.moment.time // (2 * workers) for _, one in every]
    inside = [number for number, round_ in enumerate(rounds) if round_ == STEADY + LOOKED]
    slots = {_name(every[number][1]): slot for slot, number in enumerate(inside)}
    first = [0, *accumulate(len(every[number][1].sends) for number in inside)]
    before: list[int | None] = []
    last_pass, last_message = dict[int, int](), dict[int, CyclicMessage]()
    sent, earlier = dict[CyclicMessage, tuple[int, int]](), dict[CyclicMessage, CyclicMessage | None]()
    for number, (process, one) in enumerate(every):
        before.append(last_pass.get(process))
        last_pass[process] = number
        for index, message in enumerate(one.sends):
            earlier[message], sent[message] = last_message.get(process), (number, index)
            last_message[process] = message

    def pass_at(number: int) -> Awaited:
        return slots[_name(every[number][1])], STEADY + LOOKED - rounds[number]

    def message_at(message: CyclicMessage) -> Awaited:
        number, index = sent[message]
        slot, ago = pass_at(number)
        return first[slot] + index, ago

    made = []
    for slot, number in enumerate(inside):
        (process, one), previous = every[number], before[number]
        after = None if previous is None else pass_at(previous)
        sends = tuple(range(first[slot], first[slot + 1]))
        made.append(CyclicSlot(process, one, after, tuple(map(message_at, one.receives)), sends))
    messages = tuple(message for number in inside for message in every[number][1].sends)
    behind = (earlier[message] for message in messages)
    return Loop(tuple(made), messages, tuple(None if one is None else message_at(one) for one in behind))


def _name(one: CyclicPass) -> tuple[int, int, bool]:
    return one.moment.worker, one.moment.stage, one.moment.backward


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
    number, ago = awaited
    return figures[-1 - ago][number] if ago < len(figures) else 0.0
