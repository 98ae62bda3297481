"""What a process holds while it runs each of its passes, counted from the programme's table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from galvatron_lite.parallelism.cyclic.programme import CyclicMessage, CyclicPass, CyclicProgramme, MessageContent
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting
from galvatron_lite.parallelism.cyclic.simulation import LOOKED, STEADY, steady_passes

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
    found: list[Holding] = []
    for (process, one), coming in zip(every, reversed(following), strict=True):
        if one.moment.time // (2 * workers) == STEADY + LOOKED - 1:
            found.append(processes[process].holding(process, one, coming))
        processes[process].run(one)
    return tuple(found)


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
