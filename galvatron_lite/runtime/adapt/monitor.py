"""The monitor: measures while training, and goes over to other plans as ``decide`` says. All ranks run one, alike.

Ranks speak to one another once a window of steps: what they measured goes to rank 0, which decides, and its decision to
all. Plans are made by rank 0, in a process beside it; that is asked after at the ends of windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import quantiles
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from galvatron_lite.errors import ExhaustedError, GalvatronError
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.runtime.adapt.clock import LayerClock, by_run, held_bytes
from galvatron_lite.runtime.adapt.decide import (
    AS_PROFILED,
    State,
    begin,
    on_done,
    on_exhausted,
    on_planned,
    on_window,
    wants_links,
)
from galvatron_lite.runtime.adapt.exhausted import asked_group, everywhere, factor_of, let_go
from galvatron_lite.runtime.adapt.links import measure_links, probes_of
from galvatron_lite.runtime.adapt.log import AdaptLog
from galvatron_lite.runtime.adapt.planning import PlanningProcess, PlanQuery, Replanned, answer
from galvatron_lite.runtime.adapt.schema import (
    LOG_VERSION,
    Adapt,
    AdaptAction,
    Corrections,
    Decided,
    Decision,
    Done,
    Exhausted,
    LayerGroup,
    PlannedRecord,
    Planner,
    Started,
    StepWindow,
    WindowRecord,
)
from galvatron_lite.runtime.phases import go_over
from galvatron_lite.runtime.watch.memory import EXHAUSTED

if TYPE_CHECKING:
    from torch import Tensor

    from galvatron_lite.runtime.engine import ParallelModel

_SAMPLED = 3
"""Last steps of a window whose layers are timed."""


@dataclass(frozen=True, slots=True)
class RankMeasurement:
    """What one rank measured in a window."""

    steps: tuple[float, ...]  # seconds of each
    layers: dict[str, float]  # median seconds of a forward pass, by block
    memory: int  # peak bytes; 0: not known


class Monitor:
    """Trains the steps of a model, and adapts its plan; see ``schema.Adapt``. All ranks make it together.

    Args:
        parallel: split for a plan with a prediction by the profile.
        profile: what the plan was made from.
        settings: of adapting.
        step: steps that were trained before.
        corrections: of the profile, known before.

    Attributes:
        step: steps trained.
    """

    def __init__(
        self,
        parallel: ParallelModel,
        profile: Profile,
        settings: Adapt,
        step: int = 0,
        corrections: Corrections = AS_PROFILED,
    ) -> None:
        self.step = step
        self.scheduler: Any = None
        self._parallel, self._settings = parallel, settings
        self._probes, self._names = probes_of(profile), [layer.name for layer in profile.graph.layers]
        self._clock, self._seconds = LayerClock(parallel), list[float]()
        self._started = step
        first = Started(LOG_VERSION, settings, profile, parallel.plan, step, corrections)
        self._asked, self._profile, self._world = asked_group(), profile, dist.get_world_size()
        self._mind = _Mind(first) if dist.get_rank() == 0 else None

    @property
    def phase(self) -> None:
        """None: it trains without phases."""

    @property
    def decisions(self) -> Sequence[Decision]:
        """Taken so far; on rank 0 alone."""
        return () if self._mind is None else self._mind.decisions

    def train_step(self, batch: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> Tensor:
        """One step; behind the last one of a window, what was measured is looked at."""
        settings = self._settings
        self._clock.running = len(self._seconds) >= settings.window - _SAMPLED
        before = perf_counter()
        loss = self._step(batch, optimizer, max_grad_norm)
        self._seconds.append(perf_counter() - before)
        self.step += 1
        if self.step <= self._started + settings.warm_up:
            self._seconds.clear()
        if len(self._seconds) >= settings.window:
            self._look(optimizer)
        return loss

    def _step(self, batch: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> Tensor:
        """One step; again under a plan that takes less where memory runs out on all ranks alike."""
        while True:
            try:
                return self._parallel.plain_step(batch, optimizer, max_grad_norm)
            except EXHAUSTED as error:
                alike = everywhere(error, self._asked)
                let_go(error, optimizer)
                refusal = self._make_room(optimizer) if alike else self._note_exhausted()
                if refusal:
                    raise ExhaustedError(f"Memory ran out in step {self.step}. {refusal}") from error

    def _make_room(self, optimizer: torch.optim.Optimizer) -> str:
        """Go over to a plan that takes less; why not, where there is none."""
        mind = self._mind
        plan, error = _from_rank_zero(lambda: (None, "") if mind is None else mind.exhausted(self.step, self._world))
        if plan is None:
            return (
                f"No plan takes less: {error}. Use more devices, a smaller batch, or host memory (--fix offload=...)."
            )
        refused = self._switch(optimizer, plan)
        self._seconds.clear()
        return refused

    def _note_exhausted(self) -> str:
        """Leave in the log that memory ran out on this rank; what to do."""
        factor = factor_of(self._profile, self._parallel.plan, self._settings.mem, 1.0)
        AdaptLog(self._settings.log).write(Exhausted(self.step, (dist.get_rank(),), factor))
        return (
            "Other ranks may wait for this one: start training again (torchrun --max-restarts) from the last "
            f"checkpoint. With the same Adapt(log=...) the plan is then made for {1 / factor:.0%} of the budget."
        )

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        """The end of a window."""
        device = self._parallel.device
        own = RankMeasurement(tuple(self._seconds), self._clock.take(), held_bytes(device))
        self._seconds.clear()
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        runs = [(run.first, run.count) for stage in self._parallel.plan.stages for run in stage.runs]
        window = window_of(self.step, every, self._names, runs)
        mind = self._mind
        if _from_rank_zero(lambda: mind is not None and mind.wants_links(window)):
            window = replace(window, links=measure_links(self._probes, device))
        chosen: Plan | None = _from_rank_zero(lambda: None if mind is None else mind.look(window))
        if chosen is not None:
            self._switch(optimizer, chosen)

    def _switch(self, optimizer: torch.optim.Optimizer, plan: Plan) -> str:
        """Go over to a plan, where all ranks can; else training goes on as it is. Why not, where it does."""
        error, seconds = "", 0.0
        try:
            seconds = go_over(self._parallel, optimizer, plan, self.scheduler)
        except GalvatronError as refused:
            error = str(refused)
        if self._mind is not None:
            self._mind.done(self.step, seconds, plan, error)
        self._clock.close()
        self._clock, self._started = LayerClock(self._parallel), self.step
        return error


class _Mind:
    """What rank 0 has besides: the state of decisions, the plan under way, the log."""

    def __init__(self, started: Started) -> None:
        self.state: State = begin(started)
        self.decisions: list[Decision] = []
        self._planning: PlanningProcess | None = None
        self._log = AdaptLog(started.settings.log)
        self._log.write(started)

    def wants_links(self, window: StepWindow) -> bool:
        """Whether the links are to be measured too."""
        return wants_links(self.state, window)

    def look(self, window: StepWindow) -> Plan | None:
        """What is decided at the end of a window: the plan to go over to; None: training goes on as it is."""
        self._log.write(WindowRecord(window))
        self.state, decision = self._decided(on_window(self.state, window))
        if decision.action is AdaptAction.BACK:
            return self.state.former
        if decision.action is AdaptAction.PLAN:
            self._ask()
        found = self._answer()
        if found is None:
            return None
        self._log.write(PlannedRecord(window.step, found.plan, found.error))
        self.state, decision = self._decided(on_planned(self.state, window.step, found.plan, found.error))
        return found.plan if decision.action is AdaptAction.SWITCH else None

    def exhausted(self, step: int, world: int) -> tuple[Plan | None, str]:
        """A plan that takes less than the one under which memory ran out on all ranks; or why there is none."""
        state = self.state
        if self._planning is not None:
            self._planning.stop()
            self._planning = None
        factor = factor_of(state.profile, state.plan, state.settings.mem, state.corrections.memory)
        self._log.write(Exhausted(step, tuple(range(world)), factor))
        self.state = on_exhausted(state, factor)
        found = answer(self._question)
        self._log.write(PlannedRecord(step, found.plan, found.error))
        self.state, _ = self._decided(on_planned(self.state, step, found.plan, found.error))
        return found.plan, found.error

    def done(self, step: int, seconds: float, plan: Plan, error: str) -> None:
        """A switch was made, or was not."""
        self._log.write(Done(step, seconds, error))
        self.state = on_done(self.state, step, seconds, plan, error)

    def _decided(self, taken: tuple[State, Decision]) -> tuple[State, Decision]:
        self.decisions.append(taken[1])
        self._log.write(Decided(taken[1]))
        return taken

    @property
    def _question(self) -> PlanQuery:
        state = self.state
        return PlanQuery(state.profile, state.corrections, state.plan, state.settings)

    def _ask(self) -> None:
        if self.state.settings.planner is Planner.PROCESS:
            self._planning = PlanningProcess(self._question)

    def _answer(self) -> Replanned | None:
        """The answer, where one was asked for and is there."""
        if not self.state.planning:
            return None
        if self._planning is None:
            return answer(self._question)
        if not self._planning.done:
            return None
        found, self._planning = self._planning.answer(), None
        return found


def window_of(step: int, every: Sequence[RankMeasurement], names: list[str], runs: list[tuple[str, int]]) -> StepWindow:
    """What all ranks measured, as one.

    Args:
        step: steps trained.
        every: of each rank.
        names: of all layers of the model, in order.
        runs: first layer and number of layers of each run of the plan.
    """
    slowest = [max(seconds) for seconds in zip(*(one.steps for one in every), strict=True)]
    first, middle, third = quantiles(slowest, n=4) if len(slowest) > 1 else slowest * 3
    by_rank = [by_run(one.layers, names, runs) for one in every]
    groups = []
    for name, _ in runs:
        ranks = tuple(rank for rank, found in enumerate(by_rank) if name in found)
        if ranks:
            groups.append(LayerGroup(name, ranks, tuple(by_rank[rank][name] for rank in ranks)))
    memory = tuple(one.memory for one in every)
    return StepWindow(step, (first, middle, third), tuple(groups), memory if all(memory) else ())


def _from_rank_zero(of_rank_zero: Callable[[], Any]) -> Any:
    """What rank 0 says, on every rank; an error there is raised on all."""
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = of_rank_zero()
        except Exception as error:
            box[1] = error
    dist.broadcast_object_list(box)
    if box[1] is not None:
        raise box[1]
    return box[0]
