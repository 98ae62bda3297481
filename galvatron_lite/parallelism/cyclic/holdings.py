"""What a process holds while it runs each of its passes, counted from the programme's table. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from galvatron_lite.parallelism.cyclic.messages import CyclicMessage, CyclicPass, MessageContent
from galvatron_lite.parallelism.cyclic.programme import CyclicProgramme
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting
from galvatron_lite.parallelism.cyclic.simulation import LOOKED, STEADY, steady_passes

Counts = tuple[tuple[int, int], ...]
"""Pairs of a stage and how many, of stages that have any."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What is on a process during one pass of steady state, besides what the pass itself makes."""

    process: int  # which
    does: CyclicPass  # the pass
    # micro-batches, by stage, whose activations wait for their backward passes; the pass's own is not counted
    live: Counts
    sums: tuple[int, ...]  # stages whose gradient sums grow there (``single``); the pass's own is not counted
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
    known = {process: _Process(programme, taken) for process in range(programme.processes)}
    found: list[Holding] = []
    following = _following(every)
    for place, (process, one) in enumerate(every):
        own = known[process]
        if one.moment.time // (2 * workers) == STEADY + LOOKED - 1:
            found.append(own.holding(process, one, following[place]))
        own.run(one)
    return tuple(found)


def _following(every: Sequence[tuple[int, CyclicPass]]) -> list[tuple[CyclicMessage, ...]]:
    """What the next pass of each pass's process waits for; nothing after the last."""
    later, found = dict[int, CyclicPass](), list[tuple[CyclicMessage, ...]]()
    for process, one in reversed(every):
        found.append(later[process].receives if process in later else ())
        later[process] = one
    return found[::-1]


@dataclass(slots=True)
class _Process:
    """One process on its way through the table."""

    programme: CyclicProgramme  # that it runs
    # time step at which each message is received; those that are not there are received later
    taken: dict[CyclicMessage, int]
    live: dict[tuple[int, int], int] = field(default_factory=dict)  # stage and micro-batch
    sums: set[int] = field(default_factory=set)  # stages
    updates: set[tuple[int, int]] = field(default_factory=set)  # stage and training step
    newest: dict[int, int] = field(default_factory=dict)  # version of each stage (``single``)
    sent: list[CyclicMessage] = field(default_factory=list)  # messages

    def holding(self, process: int, one: CyclicPass, coming: tuple[CyclicMessage, ...]) -> Holding:
        """What is there while it runs a pass."""
        own = (one.moment.stage, self._number(one))
        time = one.moment.time
        self.sent = [message for message in self.sent if self.taken.get(message, time) >= time]
        return Holding(
            process,
            one,
            _counts(stage for stage, number in self.live if (stage, number) != own),
            tuple(sorted(self.sums - {one.moment.stage})),
            _counts(stage for stage, _ in self.updates),
            self._versions(one),
            tuple(self.sent),
            coming,
        )

    def run(self, one: CyclicPass) -> None:
        """What a pass leaves behind."""
        stage, number = one.moment.stage, self._number(one)
        if not one.moment.backward:
            self.live[stage, number] = one.version
            self.updates -= {(stage, step) for step in one.applies}
        else:
            self.live.pop((stage, number), None)
            self._finish(one)
        self.sent += one.sends

    def _finish(self, one: CyclicPass) -> None:
        stage, setting = one.moment.stage, self.programme.setting
        if setting is CyclicSetting.SINGLE:
            (self.sums.discard if one.finishes else self.sums.add)(stage)
        elif setting is not CyclicSetting.ZERO and one.finishes:
            self.updates.add((stage, one.moment.step))
        if one.finishes:
            self.newest[stage] = one.moment.step + 1

    def _versions(self, one: CyclicPass) -> Counts:
        setting, stage = self.programme.setting, one.moment.stage
        if setting is CyclicSetting.ZERO:
            carried = [{one.version}, {one.version}]
            for place, messages in enumerate((one.receives, one.sends)):
                for message in messages:
                    carried[place] |= set(message.versions)
            return ((stage, max(map(len, carried))),)
        if setting is CyclicSetting.SINGLE:
            return tuple((own, self._alive(one, own)) for own in range(self.programme.workers))
        process = self.programme.process_of(stage, self._number(one))
        return tuple((own, 1) for own in self.programme.stages_of(process))

    def _alive(self, one: CyclicPass, stage: int) -> int:
        """The most versions of a stage, from the oldest that some micro-batch still needs to the newest, before and
        after the update that a pass ends with."""
        own = (one.moment.stage, self._number(one))
        newest, coming = self.newest.get(stage, one.moment.step), self._next_version(one, stage)
        used = {key: version for key, version in self.live.items() if key[0] == stage}
        before = newest - min([*used.values(), coming, newest]) + 1
        if not (one.finishes and one.moment.stage == stage):
            return before
        left = [version for key, version in used.items() if key != own]
        return max(before, newest + 1 - min([*left, coming, newest + 1]) + 1)

    def _next_version(self, one: CyclicPass, stage: int) -> int:
        """The version that the next micro-batch to come to a stage uses."""
        # The stage's forward passes follow one another every two time steps: micro-batch n at 2n + stage.
        return self.programme.version(stage, -(-(one.moment.time - stage) // 2))

    def _number(self, one: CyclicPass) -> int:
        return one.moment.step * self.programme.workers + one.moment.worker


def _counts(stages: Iterable[int]) -> Counts:
    return tuple(sorted(Counter(stages).items()))


def beside(one: CyclicPass) -> tuple[CyclicMessage, ...]:
    """Messages received for a pass that lie beside what it computes with: gradient sums that grow on, and under
    ``zero`` all that comes, are what it computes with."""
    own = (MessageContent.WEIGHTS, MessageContent.STATES, MessageContent.PARTIAL)
    return tuple(message for message in one.receives if message.kind not in own)
