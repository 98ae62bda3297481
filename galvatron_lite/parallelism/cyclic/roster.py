"""Which process runs a stage of a micro-batch, and which version of the parameters that uses. No torch here.

Workers, stages and training steps are counted from 0; micro-batch n = N * step + worker. Where passes run
(``CyclicSetting``) is all that differs between the settings:

- ``single``: on process 0.
- ``data``, ``zero``: on the process of the worker.
- ``stages``: stage s has N - s processes (a micro-batch occupies it for 2(N - s) time steps, and one begins every two);
  micro-batch n runs on the n-th of them, modulo their number. N(N+1)/2 processes in all.
"""

from __future__ import annotations

from dataclasses import dataclass

from galvatron_lite.parallelism.cyclic.messages import CyclicMessage, MessageContent
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting, device_count, version


@dataclass(frozen=True, slots=True)
class Roster:
    """``workers`` micro-batches over as many stages."""

    rule: CyclicRule  # which parameters a micro-batch uses
    setting: CyclicSetting  # where its passes run
    workers: int  # N
    # first training step that is run. All processes know the parameters at versions ``base`` and ``begin``
    begin: int = 0
    base: int = 0  # oldest version used: ``begin`` where nothing is delayed yet, ``begin`` - 1 where a run is continued

    @property
    def processes(self) -> int:
        """How many processes run it."""
        return device_count(self.setting, self.workers)

    def replicas(self, stage: int) -> int:
        """How many processes run a stage."""
        if self.setting is CyclicSetting.SINGLE:
            return 1
        return self.workers - stage if self.setting is CyclicSetting.STAGES else self.workers

    def process_of(self, stage: int, number: int) -> int:
        """The process that runs a stage of micro-batch ``number``."""
        if self.setting is CyclicSetting.SINGLE:
            return 0
        if self.setting is not CyclicSetting.STAGES:
            return number % self.workers
        # stages before this one have N, N - 1, ... processes
        return stage * self.workers - stage * (stage - 1) // 2 + number % self.replicas(stage)

    def home(self, stage: int) -> int:
        """Under ``zero``: the process that keeps a stage's states while nothing runs."""
        return stage if self.setting is CyclicSetting.ZERO else self.process_of(stage, 0)

    def stages_of(self, process: int) -> tuple[int, ...]:
        """The stages that a process runs."""
        numbers = range(self.workers)
        return tuple(
            stage for stage in numbers if process in {self.process_of(stage, number) for number in range(self.workers)}
        )

    def version(self, stage: int, number: int) -> int:
        """The version of a stage's parameters that a micro-batch uses."""
        return version(self.rule, number % self.workers, stage, self.workers, number // self.workers, self.base)

    def joins(self, stage: int, step: int) -> int:
        """The micro-batch before whose forward pass the update of a training step comes to the forward track."""
        return self.first_use(stage, step, CyclicRule.V2)

    def first_use(self, stage: int, step: int, rule: CyclicRule) -> int:
        """The first micro-batch that may use what the update of a training step gave."""
        if rule is CyclicRule.V1:
            return (step + 2) * self.workers
        return (step + 1) * self.workers + self.workers - 1 - stage

    def last_of(self, step: int) -> int:
        """The last micro-batch of a training step, whose backward pass completes the gradients."""
        return step * self.workers + self.workers - 1

    def message(
        self, kind: MessageContent, stage: int, number: int, source: int, target: int, versions: range = range(0)
    ) -> CyclicMessage:
        """What leaves a process at a pass of micro-batch ``number``."""
        return CyclicMessage(
            kind, stage, number // self.workers, number % self.workers, source, target, tuple(versions)
        )
