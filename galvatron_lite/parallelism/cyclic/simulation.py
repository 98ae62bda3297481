"""How long a training step takes in steady state: the programme's own table, walked through as events.

Every process runs its passes in the order of its programme, each as soon as the one before it is done and the messages
it waits for have come. A message leaves when its pass is done and the message before it from the same process has
arrived, beside whatever its process computes. The table repeats itself from training step to training step, so the
ends of passes grow by a constant for each (Baccelli et al. 1992, "Synchronization and Linearity", theorem 3.109): the
seconds of a step. Under ``stages`` the processes of a stage take turns; what a message between two stages takes must
not depend on which of them send it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

import numpy as np

from galvatron_lite.arrays import FloatArray
from galvatron_lite.parallelism.cyclic.programme import CyclicMessage, CyclicPass, CyclicProgramme, MessageContent
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


# What a process holds while it runs each of its passes, counted from the programme's table.


Counts = tuple[tuple[int, int], ...]
"""Pairs of a stage and how many, of stages that have any."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What is on a process during one pass of steady state, besides what the pass itself makes."""

    process: int
    does: CyclicPass
    live: Counts  # by stage, other micro-batches whose activations wait for their backward passes
    sums: tuple[int, ...]  # other stages whose gradient sums grow there (``single``)
    updates: Counts  # complete gradient sums, by stage, that are there before the pass and wait to be applied or sent
    versions: Counts  # of each stage's parameters that are there, those that the pass makes among them
    waiting: tuple[CyclicMessage, ...]  # messages that the process has sent and nobody has taken yet
    coming: tuple[CyclicMessage, ...]  # messages that its next pass waits for: they may come while this one runs


@lru_cache(maxsize=16)
def holdings(rule: CyclicRule, setting: CyclicSetting, workers: int) -> tuple[Holding, ...]:
    """The holdings of every process at each pass of one round of 2N time steps."""
    programme = CyclicProgramme(rule, setting, workers)
    every = steady_passes(programme)
    taken = {message: one.moment.time for _, one in every for message in one.receives}
    processes = {process: _Process(programme, taken) for process in range(programme.processes)}
    next_of = dict[int, CyclicPass]()
    following = list[tuple[CyclicMessage, ...]]()
    for process, one in reversed(every):
        following.append(next_of[process].receives if process in next_of else ())
        next_of[process] = one
    result: list[Holding] = []
    for (process, one), coming in zip(every, reversed(following), strict=True):
        if one.moment.time // (2 * workers) == STEADY + LOOKED - 1:
            result.append(processes[process].holding(process, one, coming))
        processes[process].run(one)
    return tuple(result)


@dataclass(slots=True)
class _Process:
    programme: CyclicProgramme
    taken: dict[CyclicMessage, int]  # time step at which each message is received; others are received later
    live: dict[tuple[int, int], int] = field(default_factory=dict)  # version, by stage and micro-batch
    sums: set[int] = field(default_factory=set)  # stages
    updates: set[tuple[int, int]] = field(default_factory=set)  # stage and training step
    newest: dict[int, int] = field(default_factory=dict)  # version of each stage (``single``)
    sent: list[CyclicMessage] = field(default_factory=list)

    def holding(self, process: int, one: CyclicPass, coming: tuple[CyclicMessage, ...]) -> Holding:
        """What is there while it runs a pass."""
        time = one.moment.time
        self.sent = [message for message in self.sent if self.taken.get(message, time) >= time]
        return Holding(
            process,
            one,
            _counts(stage for stage, number in self.live if (stage, number) != self._place(one)),
            tuple(sorted(self.sums - {one.moment.stage})),
            _counts(stage for stage, _ in self.updates),
            self._versions(one),
            tuple(self.sent),
            coming,
        )

    def run(self, one: CyclicPass) -> None:
        """What a pass leaves behind."""
        stage = one.moment.stage
        if not one.moment.backward:
            self.live[self._place(one)] = one.version
            self.updates -= {(stage, step) for step in one.applies}
        else:
            self.live.pop(self._place(one), None)
            if self.programme.setting is CyclicSetting.SINGLE:
                (self.sums.discard if one.finishes else self.sums.add)(stage)
            elif one.finishes:
                self.updates.add((stage, one.moment.step))
            if one.finishes:
                self.newest[stage] = one.moment.step + 1
        self.sent += one.sends

    def _versions(self, one: CyclicPass) -> Counts:
        if self.programme.setting is CyclicSetting.SINGLE:
            return tuple((stage, self._alive(one, stage)) for stage in range(self.programme.workers))
        process = self.programme.process_of(*self._place(one))
        return tuple((stage, 1) for stage in self.programme.stages_of(process))

    def _alive(self, one: CyclicPass, stage: int) -> int:
        """The most versions of a stage, from the oldest that some micro-batch still needs to the newest, before and
        after the update that a pass ends with."""
        newest = self.newest.get(stage, one.moment.step)
        # the stage's forward passes follow one another every two time steps: micro-batch n at 2n + stage
        coming = self.programme.version(stage, -(-(one.moment.time - stage) // 2))
        used = {place: version for place, version in self.live.items() if place[0] == stage}
        before = newest - min([*used.values(), coming, newest]) + 1
        if not (one.finishes and one.moment.stage == stage):
            return before
        left = [version for place, version in used.items() if place != self._place(one)]
        return max(before, newest + 1 - min([*left, coming, newest + 1]) + 1)

    def _place(self, one: CyclicPass) -> tuple[int, int]:
        """Stage and number of the micro-batch."""
        return one.moment.stage, one.moment.step * self.programme.workers + one.moment.worker


def _counts(stages: Iterable[int]) -> Counts:
    return tuple(sorted(Counter(stages).items()))


def beside(one: CyclicPass) -> tuple[CyclicMessage, ...]:
    """Messages received for a pass that lie beside what it computes with; gradient sums that grow on do not."""
    return tuple(message for message in one.receives if message.kind is not MessageContent.PARTIAL)


# Stages of equal time: the contiguous split whose slowest stage is quickest.


_ROUNDING = 1e-12


def equal_cuts(seconds: Sequence[float], stages: int, joined: Collection[range] = ()) -> tuple[int, ...]:
    """Places where stages begin, and the number of layers: (0, ..., L); empty where there are too few layers.

    No split has a quicker slowest stage, and of those that have as quick a one none has a lesser sum of squares. By
    dynamic programming over (stages so far, layers so far): O(N L^2).

    Args:
        seconds: (L,) forward and backward of each layer.
        stages: N; each has at least one layer.
        joined: runs of layers that must be in one stage (they share parameters).
    """
    inside = {place for run in joined for place in range(run.start + 1, run.stop)}
    places = [place for place in range(len(seconds) + 1) if place not in inside]
    if not 1 <= stages <= len(places) - 1:
        return ()
    totals = np.array([0.0, *accumulate(seconds)])[places]
    spans = totals[None, :] - totals[:, None]
    spans[np.tril_indices(len(places))] = np.inf
    least = _best(spans, stages, np.maximum)[0][-1]
    even = np.where(spans <= least * (1 + _ROUNDING), spans**2, np.inf)
    return tuple(places[place] for place in _best(even, stages, np.add)[1])


def _best(spans: FloatArray, stages: int, joining: np.ufunc) -> tuple[FloatArray, list[int]]:
    """Least join of ``stages`` spans over the first places, for every number of places; and the cuts of all of them."""
    best, chosen = spans[0].copy(), []
    for _ in range(stages - 1):
        every = joining(best[:, None], spans)
        chosen.append(every.argmin(axis=0))
        best = every.min(axis=0)
    cuts = [len(best) - 1]
    for places in reversed(chosen):
        cuts.append(int(places[cuts[-1]]))
    return best, [0, *reversed(cuts)]


def unevenness(seconds: Sequence[float]) -> float:
    """By what share the slowest stage takes longer than the mean of them: what equal stages would save."""
    mean = sum(seconds) / len(seconds)
    return max(seconds) / mean - 1.0 if mean > 0 else 0.0
