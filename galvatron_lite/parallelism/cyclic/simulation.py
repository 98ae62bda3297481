"""The steady state of cyclic data parallelism: the seconds of a training step, what processes hold, and equal stages.

Every process runs its passes in the order of its programme, each as soon as the pass before it is done and the messages
that it waits for have come. A message leaves when its pass is done and the previous message of the same process has
arrived, beside what its process computes. The programme repeats from training step to training step, so that the ends
of passes grow by a constant for each (Baccelli et al. 1992, "Synchronization and Linearity", theorem 3.109): the
seconds of a step. Under ``stages`` the processes of a stage take turns; the seconds of a message between two stages
must not depend on which of them send it.
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
"""The first training step whose passes are those of any later one: updates reach their last users two steps later."""
LOOKED = 4
"""Training steps before a round that its passes may wait for something of, and more."""
_REPEATS, _SAME = 4, 1e-9
_ROUNDS = 8
"""Rounds a worker after which the mean growth of the second half counts, if ends have not settled."""
_ROUNDING = 1e-12

Awaited = tuple[int, int]
"""Index in a round, and how many rounds ago."""


@dataclass(frozen=True, slots=True)
class CyclicSlot:
    """A pass of the loop; it recurs in every round of 2N time steps."""

    process: int  # that runs it, in the round from which the loop is made
    action: CyclicPass
    after: Awaited | None  # the previous pass of its process
    receives: tuple[Awaited, ...]  # indices of the messages that it waits for
    sends: tuple[int, ...]  # indices of its messages


@dataclass(frozen=True, slots=True)
class Loop:
    """The passes and messages of a round: each stage forward and backward by each worker once."""

    slots: tuple[CyclicSlot, ...]  # each after all that it waits for
    messages: tuple[CyclicMessage, ...]
    previous: tuple[Awaited | None, ...]  # of each message, the previous message of the same process


@lru_cache(maxsize=1)
def steady_passes(programme: CyclicProgramme) -> tuple[tuple[int, CyclicPass], ...]:
    """Return every pass of some training steps from the first steady one on, with its process."""
    return programme.all_passes(range(STEADY, STEADY + LOOKED + 1))


@lru_cache(maxsize=16)
def loop_of(rule: CyclicRule, setting: CyclicSetting, workers: int) -> Loop:
    """Return the loop of a programme in steady state."""
    passes = steady_passes(CyclicProgramme(rule, setting, workers))
    rounds = [action.moment.time // (2 * workers) for _, action in passes]
    inside = [number for number, round_ in enumerate(rounds) if round_ == STEADY + LOOKED]
    slots = {_name(passes[number][1]): slot for slot, number in enumerate(inside)}
    first_message = [0, *accumulate(len(passes[number][1].sends) for number in inside)]
    before: list[int | None] = []
    last_pass, last_message = dict[int, int](), dict[int, CyclicMessage]()
    sent, previous = dict[CyclicMessage, tuple[int, int]](), dict[CyclicMessage, CyclicMessage | None]()
    for number, (process, action) in enumerate(passes):
        before.append(last_pass.get(process))
        last_pass[process] = number
        for index, message in enumerate(action.sends):
            previous[message], sent[message] = last_message.get(process), (number, index)
            last_message[process] = message

    def awaited_pass(number: int) -> Awaited:
        return slots[_name(passes[number][1])], STEADY + LOOKED - rounds[number]

    def awaited_message(message: CyclicMessage) -> Awaited:
        number, index = sent[message]
        slot, ago = awaited_pass(number)
        return first_message[slot] + index, ago

    loop_slots = []
    for slot, number in enumerate(inside):
        (process, action), earlier = passes[number], before[number]
        after = None if earlier is None else awaited_pass(earlier)
        sends = tuple(range(first_message[slot], first_message[slot + 1]))
        loop_slots.append(CyclicSlot(process, action, after, tuple(map(awaited_message, action.receives)), sends))
    messages = tuple(message for number in inside for message in passes[number][1].sends)
    waits = tuple(
        None if before_it is None else awaited_message(before_it) for before_it in map(previous.get, messages)
    )
    return Loop(tuple(loop_slots), messages, waits)


def _name(action: CyclicPass) -> tuple[int, int, bool]:
    return action.moment.worker, action.moment.stage, action.moment.backward


def round_seconds(loop: Loop, passes: Sequence[float], messages: Sequence[float]) -> float:
    """Simulate a loop and return the seconds of a training step in steady state.

    Args:
        loop: of the programme.
        passes: seconds of each slot, on its process.
        messages: seconds of each message, from the end of its pass to its arrival over an idle link.
    """
    ends: list[list[float]] = []
    arrivals: list[list[float]] = []
    most = _ROUNDS * len({slot.action.moment.worker for slot in loop.slots}) + _ROUNDS
    for number in range(most):
        _simulate_round(loop, passes, messages, ends, arrivals)
        for repeat in range(1, min(_REPEATS, number // 2) + 1):
            seconds = _settled_seconds(ends, repeat)
            if seconds is not None:
                return seconds
    half = most // 2
    return max(new - old for new, old in zip(ends[-1], ends[half - 1], strict=True)) / (most - half)


def _settled_seconds(ends: Sequence[Sequence[float]], repeat: int) -> float | None:
    """Seconds of a round once all ends grow equally over ``repeat`` rounds, twice in a row; None before that."""
    new, old, first = ends[-1], ends[-1 - repeat], ends[-1 - 2 * repeat]
    growth = new[0] - old[0]
    tolerance = _SAME * growth
    settled = all(
        abs(a - b - growth) <= tolerance and abs(b - c - growth) <= tolerance
        for a, b, c in zip(new, old, first, strict=True)
    )
    return growth / repeat if settled else None


def _simulate_round(
    loop: Loop,
    passes: Sequence[float],
    messages: Sequence[float],
    ends: list[list[float]],
    arrivals: list[list[float]],
) -> None:
    """Append the ends of passes and the arrivals of messages of one more round."""
    ends.append([0.0] * len(loop.slots))
    arrivals.append([0.0] * len(loop.messages))
    for number, slot in enumerate(loop.slots):
        start = 0.0 if slot.after is None else _earlier(ends, slot.after)
        for awaited in slot.receives:
            start = max(start, _earlier(arrivals, awaited))
        end = start + passes[number]
        ends[-1][number] = end
        for message in slot.sends:
            previous = loop.previous[message]
            departure = end if previous is None else max(end, _earlier(arrivals, previous))
            arrivals[-1][message] = departure + messages[message]


def _earlier(moments: list[list[float]], awaited: Awaited) -> float:
    index, ago = awaited
    return moments[-1 - ago][index] if ago < len(moments) else 0.0


Counts = tuple[tuple[int, int], ...]
"""Pairs of a stage and how many, of stages that have any."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a process holds during a pass in steady state, besides what the pass makes."""

    process: int
    action: CyclicPass
    live: Counts  # by stage, other micro-batches whose activations wait for backward
    sums: tuple[int, ...]  # other stages whose sums of gradients grow there (``single``)
    updates: Counts  # complete sums of gradients, by stage, that wait to be applied or sent
    versions: Counts  # of the parameters of each stage, with those that the pass makes
    unreceived: tuple[CyclicMessage, ...]  # messages that it has sent and no process has received yet
    next_receives: tuple[CyclicMessage, ...]  # messages of its next pass, which may come during this one


@lru_cache(maxsize=16)
def holdings(rule: CyclicRule, setting: CyclicSetting, workers: int) -> tuple[Holding, ...]:
    """Return what every process holds at each pass of one round of 2N time steps."""
    programme = CyclicProgramme(rule, setting, workers)
    passes = steady_passes(programme)
    received = {message: action.moment.time for _, action in passes for message in action.receives}
    processes = {process: _Process(programme, received) for process in range(programme.processes)}
    next_pass = dict[int, CyclicPass]()
    next_receives = list[tuple[CyclicMessage, ...]]()
    for process, action in reversed(passes):
        next_receives.append(next_pass[process].receives if process in next_pass else ())
        next_pass[process] = action
    result: list[Holding] = []
    for (process, action), receives in zip(passes, reversed(next_receives), strict=True):
        if action.moment.time // (2 * workers) == STEADY + LOOKED - 1:
            result.append(processes[process].holding(process, action, receives))
        processes[process].run(action)
    return tuple(result)


@dataclass(slots=True)
class _Process:
    """The state of a process."""

    programme: CyclicProgramme
    received: dict[CyclicMessage, int]  # time step at which each message is received; others are received later
    live: dict[tuple[int, int], int] = field(default_factory=dict)  # version, by stage and micro-batch
    sums: set[int] = field(default_factory=set)  # stages
    updates: set[tuple[int, int]] = field(default_factory=set)  # stage and training step
    newest: dict[int, int] = field(default_factory=dict)  # version of each stage (``single``)
    sent: list[CyclicMessage] = field(default_factory=list)

    def holding(self, process: int, action: CyclicPass, next_receives: tuple[CyclicMessage, ...]) -> Holding:
        """What it holds while it runs a pass."""
        time = action.moment.time
        self.sent = [message for message in self.sent if self.received.get(message, time) >= time]
        return Holding(
            process,
            action,
            _counts(stage for stage, number in self.live if (stage, number) != self._key(action)),
            tuple(sorted(self.sums - {action.moment.stage})),
            _counts(stage for stage, _ in self.updates),
            self._versions(action),
            tuple(self.sent),
            next_receives,
        )

    def run(self, action: CyclicPass) -> None:
        """Change the state by a pass."""
        stage = action.moment.stage
        if not action.moment.backward:
            self.live[self._key(action)] = action.version
            self.updates -= {(stage, step) for step in action.applies}
        else:
            self.live.pop(self._key(action), None)
            if self.programme.setting is CyclicSetting.SINGLE:
                (self.sums.discard if action.finishes else self.sums.add)(stage)
            elif action.finishes:
                self.updates.add((stage, action.moment.step))
            if action.finishes:
                self.newest[stage] = action.moment.step + 1
        self.sent += action.sends

    def _versions(self, action: CyclicPass) -> Counts:
        if self.programme.setting is CyclicSetting.SINGLE:
            return tuple((stage, self._versions_of(stage, action)) for stage in range(self.programme.workers))
        process = self.programme.process_of(*self._key(action))
        return tuple((stage, 1) for stage in self.programme.stages_of(process))

    def _versions_of(self, stage: int, action: CyclicPass) -> int:
        """The most versions of a stage, from the oldest that a micro-batch still needs to the newest, before and after
        the update at the end of a pass."""
        newest = self.newest.get(stage, action.moment.step)
        # the stage's forward passes follow one another every two time steps: micro-batch n at 2n + stage
        coming = self.programme.version(stage, -(-(action.moment.time - stage) // 2))
        used = {key: version for key, version in self.live.items() if key[0] == stage}
        before = newest - min([*used.values(), coming, newest]) + 1
        if not (action.finishes and action.moment.stage == stage):
            return before
        left = [version for key, version in used.items() if key != self._key(action)]
        return max(before, newest + 1 - min([*left, coming, newest + 1]) + 1)

    def _key(self, action: CyclicPass) -> tuple[int, int]:
        """Stage and number of the micro-batch."""
        return action.moment.stage, action.moment.step * self.programme.workers + action.moment.worker


def _counts(stages: Iterable[int]) -> Counts:
    return tuple(sorted(Counter(stages).items()))


def received_beside(action: CyclicPass) -> tuple[CyclicMessage, ...]:
    """Return the messages received for a pass that are held beside what it computes with.

    Sums of gradients are not: they grow in place.
    """
    return tuple(message for message in action.receives if message.kind is not MessageContent.PARTIAL)


def equal_cuts(seconds: Sequence[float], stages: int, joined: Collection[range] = ()) -> tuple[int, ...]:
    """Split layers into contiguous stages so that the slowest stage is as quick as possible.

    Of such splits the result has the least sum of squares. Dynamic programming over (stages so far, layers so far):
    O(N L^2).

    Args:
        seconds: (L,) forward and backward of each layer.
        stages: N; each has at least one layer.
        joined: runs of layers that must be in one stage (they share parameters).

    Returns:
        The indices of the layers at which stages begin, and the number of layers; empty if there are too few layers.
    """
    inside = {index for run in joined for index in range(run.start + 1, run.stop)}
    cuts = [index for index in range(len(seconds) + 1) if index not in inside]
    if not 1 <= stages <= len(cuts) - 1:
        return ()
    totals = np.array([0.0, *accumulate(seconds)])[cuts]
    spans = totals[None, :] - totals[:, None]
    spans[np.tril_indices(len(cuts))] = np.inf
    least = _best_cuts(spans, stages, np.maximum)[0][-1]
    squares = np.where(spans <= least * (1 + _ROUNDING), spans**2, np.inf)
    return tuple(cuts[cut] for cut in _best_cuts(squares, stages, np.add)[1])


def _best_cuts(spans: FloatArray, stages: int, combine: np.ufunc) -> tuple[FloatArray, list[int]]:
    """The least combination of ``stages`` spans up to every cut, and the cuts of the one up to the last."""
    best, choices = spans[0].copy(), []
    for _ in range(stages - 1):
        combined = combine(best[:, None], spans)
        choices.append(combined.argmin(axis=0))
        best = combined.min(axis=0)
    cuts = [len(best) - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return best, [0, *reversed(cuts)]


def unevenness(seconds: Sequence[float]) -> float:
    """Return the share by which the slowest stage takes longer than their mean: what equal stages would save."""
    mean = sum(seconds) / len(seconds)
    return max(seconds) / mean - 1.0 if mean > 0 else 0.0
