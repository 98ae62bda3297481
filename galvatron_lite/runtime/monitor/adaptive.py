"""The monitor: measures while training, and changes the plan as ``decide`` says. All ranks run one, alike.

Ranks communicate once a window of steps: their measurements go to rank 0, which decides, and its decision to all. New
plans are made by rank 0, in a process beside it, which is polled at the ends of windows.

Where memory runs out on every rank, at the same place of a forward pass, nothing was updated, and no rank waits for
another: training continues from the tensors in memory under a plan that takes less. Elsewhere (on some ranks alone, in
backward, in the optimizer) other ranks wait in collectives that nobody joins; the error then says so, the log keeps the
factor, and the restarted run plans with it and loads its last checkpoint.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from statistics import quantiles
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from galvatron_lite.cluster.budget import DEFAULT_BUDGET, budget_on
from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.errors import ExhaustedError, GalvatronError
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.measure_hardware import make_group, prepare
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.runtime.monitor.clock import LayerClock
from galvatron_lite.runtime.monitor.correct import link_probes
from galvatron_lite.runtime.monitor.decide import AS_PROFILED, State, begin, decide, wants_links, write_record
from galvatron_lite.runtime.monitor.notes import EXHAUSTED
from galvatron_lite.runtime.monitor.planning import PlanningProcess, answer, plain
from galvatron_lite.runtime.monitor.schema import (
    LOG_VERSION,
    Adapt,
    AdaptAction,
    Corrections,
    Decided,
    Decision,
    Done,
    Event,
    Exhausted,
    LayerGroup,
    LinkPoint,
    Planner,
    Started,
    StepWindow,
    WindowRecord,
)
from galvatron_lite.runtime.peers import everyone, from_rank_zero
from galvatron_lite.runtime.phases import go_over

if TYPE_CHECKING:
    from torch import Tensor

    from galvatron_lite.runtime.engine import ParallelModel

_SAMPLED = 3
"""Last steps of a window whose layers are timed."""
_REPETITIONS = 9
"""Measurements of a link; the second quickest counts: other work makes a transfer longer, nothing makes it shorter."""
PATIENCE = timedelta(seconds=10)
"""How long a rank out of memory waits for the others, to learn whether they are, too."""
_LEAST, _OVER = 1.1, 1.02


RankMeasurement = tuple[tuple[float, ...], dict[str, float], int]
"""Of a window: seconds of each step; median seconds of a forward pass, by block; peak bytes, 0: not known."""


class Monitor:
    """Trains the steps of a model, and adapts its plan; see ``schema.Adapt``. All ranks make it together.

    Args:
        parallel: split for a plan with a prediction by the profile.
        corrections: of the profile, from an earlier run.
    """

    def __init__(
        self,
        parallel: ParallelModel,
        profile: Profile,
        settings: Adapt,
        corrections: Corrections = AS_PROFILED,
    ) -> None:
        self.step = 0
        self.scheduler: Any = None
        self._parallel, self._profile, self._settings = parallel, profile, settings
        self._names = [layer.name for layer in profile.graph.layers]
        self._probes = [
            (point, make_group(RankGroup(int(group.size), int(group.stride), int(group.siblings))))
            for group, points in link_probes(profile)
            for point in points
        ]
        self._clock, self._seconds, self._ignored = LayerClock(parallel), list[float](), settings.warm_up
        self._group = None if dist.get_world_size() == 1 else dist.new_group(backend="gloo", timeout=PATIENCE)
        first = Started(LOG_VERSION, settings, profile, parallel.plan, corrections=corrections)
        self._decider = _Decider(first) if dist.get_rank() == 0 else None

    @property
    def phase(self) -> None:
        """None: it trains without phases."""

    @property
    def decisions(self) -> Sequence[Decision]:
        """Decisions so far; on rank 0 alone."""
        return () if self._decider is None else self._decider.decisions

    def train_step(self, batch: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> Tensor:
        """One step; after the last one of a window, decide."""
        settings = self._settings
        self._clock.running = len(self._seconds) >= settings.window - _SAMPLED
        before = perf_counter()
        loss = self._step(batch, optimizer, max_grad_norm)
        self._seconds.append(perf_counter() - before)
        self.step += 1
        if self._ignored > 0:
            self._ignored -= 1
            self._seconds.clear()
        if len(self._seconds) >= settings.window:
            self._end_window(optimizer)
        return loss

    def _step(self, batch: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> Tensor:
        """One step; again under a plan that takes less where memory runs out on all ranks."""
        while True:
            try:
                return self._parallel.plain_step(batch, optimizer, max_grad_norm)
            except EXHAUSTED as error:
                on_all = _ran_out_everywhere(error, self._group)
                # gradients, and activations in the frames of the error
                traceback.clear_frames(error.__traceback__)
                optimizer.zero_grad(set_to_none=True)
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                refusal = self._make_room(optimizer) if on_all else self._note_exhausted()
                if refusal:
                    raise ExhaustedError(f"Memory ran out in step {self.step}. {refusal}") from error

    def _make_room(self, optimizer: torch.optim.Optimizer) -> str:
        """Change to a plan that takes less; why not, where there is none."""
        decider = self._decider
        plan, error = from_rank_zero(lambda: (None, "") if decider is None else decider.exhausted(self.step))
        if plan is None:
            return (
                f"No plan takes less: {error}. Use more devices, a smaller batch, or host memory (--fix offload=...)."
            )
        refusal = self._switch(optimizer, plan)
        self._seconds.clear()
        return refusal

    def _note_exhausted(self) -> str:
        """Log that memory ran out on this rank; the remedy."""
        factor = exhaustion_factor(self._profile, self._parallel.plan, self._settings.mem, 1.0)
        write_record(self._settings.log, Exhausted(self.step, (dist.get_rank(),), factor))
        return (
            "Other ranks may wait for this one: start training again (torchrun --max-restarts) from the last "
            f"checkpoint. With the same Adapt(log=...) the plan is then made for {1 / factor:.0%} of the budget."
        )

    def _end_window(self, optimizer: torch.optim.Optimizer) -> None:
        device, decider, memory = self._parallel.device, self._decider, 0
        if device.type == "cuda":
            memory = torch.cuda.max_memory_reserved(device)
            torch.cuda.reset_peak_memory_stats(device)
        every: list[RankMeasurement] = everyone((tuple(self._seconds), self._clock.take(), memory))
        self._seconds.clear()
        runs = [(run.first, run.count) for stage in self._parallel.plan.stages for run in stage.runs]
        window = window_of(self.step, every, self._names, runs)
        if from_rank_zero(lambda: decider is not None and wants_links(decider.state, window)):
            window = replace(window, links=measure_links(self._probes, device))
        chosen: Plan | None = from_rank_zero(lambda: decider and decider.decide(window))
        if chosen is not None:
            self._switch(optimizer, chosen)

    def _switch(self, optimizer: torch.optim.Optimizer, plan: Plan) -> str:
        """Change to a plan; where a rank cannot, training continues under the present one. The error, if any."""
        error, seconds = "", 0.0
        try:
            seconds = go_over(self._parallel, optimizer, plan, self.scheduler)
        except GalvatronError as refusal:
            error = str(refusal)
        if self._decider is not None:
            self._decider.feed(Done(self.step, seconds, error))
        self._clock.close()
        self._clock, self._ignored = LayerClock(self._parallel), self._settings.warm_up
        return error


class _Decider:
    """What rank 0 has besides: the state of decisions, the planning process, the log."""

    def __init__(self, started: Started) -> None:
        self.state: State = begin(started)
        self.decisions: list[Decision] = []
        self._planning: PlanningProcess | None = None
        self._log = started.settings.log
        write_record(self._log, started)

    def feed(self, event: Event) -> Decision | None:
        """Log an event, and the decision that it leads to."""
        write_record(self._log, event)
        self.state, decision = decide(self.state, event)
        if decision is not None:
            self.decisions.append(decision)
            write_record(self._log, Decided(decision))
        return decision

    def decide(self, window: StepWindow) -> Plan | None:
        """The plan to change to after a window; None: training continues as it is."""
        decision = self.feed(WindowRecord(window))
        assert decision is not None
        if decision.action is AdaptAction.PLAN and self.state.settings.planner is Planner.PROCESS:
            self._planning = PlanningProcess(self.state.query(window.step))
        if self.state.planning and (self._planning is None or self._planning.done):
            reply = answer(self.state.query(window.step)) if self._planning is None else self._planning.answer()
            self._planning = None
            self.feed(replace(reply, step=window.step))
        return self.state.target

    def exhausted(self, step: int) -> tuple[Plan | None, str]:
        """A plan that takes less than the one under which memory ran out on all ranks; or why there is none."""
        state = self.state
        if self._planning is not None:
            self._planning.stop()
            self._planning = None
        factor = exhaustion_factor(state.profile, state.plan, state.settings.mem, state.corrections.memory)
        self.feed(Exhausted(step, tuple(range(dist.get_world_size())), factor))
        reply = answer(self.state.query(step))
        self.feed(reply)
        return self.state.target, reply.error


def window_of(step: int, every: Sequence[RankMeasurement], names: list[str], runs: list[tuple[str, int]]) -> StepWindow:
    """The measurements of all ranks as a window."""
    steps, layers, memory = zip(*every, strict=True)
    slowest = [max(seconds) for seconds in zip(*steps, strict=True)]
    first, middle, third = quantiles(slowest, n=4) if len(slowest) > 1 else slowest * 3
    groups = []
    for name, count in runs:
        members = names[names.index(name) : names.index(name) + count]
        seconds = {
            rank: sum(passes[layer] for layer in members)
            for rank, passes in enumerate(layers)
            if passes.keys() >= set(members)
        }
        if seconds:
            groups.append(LayerGroup(name, tuple(seconds), tuple(seconds.values())))
    return StepWindow(step, (first, middle, third), tuple(groups), memory if all(memory) else ())


def measure_links(
    probes: Sequence[tuple[LinkPoint, dist.ProcessGroup | None]], device: torch.device
) -> tuple[LinkPoint, ...]:
    """Measure the links, each on this rank's group of its level; all ranks of the world call it, and get the same.

    Collectives inside a step tell little of a link: they wait for whoever is last.
    """
    points = []
    for point, group in probes:
        call = prepare(Collective.ALL_REDUCE, point.size, group, device)
        call()
        seconds = torch.tensor([_seconds(call, device) for _ in range(_REPETITIONS)], device=device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        points.append(replace(point, seconds=float(seconds.sort().values[1])))
    return tuple(points)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call that all ranks start together."""
    dist.barrier()
    _synchronize(device)
    before = perf_counter()
    call()
    _synchronize(device)
    return perf_counter() - before


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ran_out_everywhere(error: BaseException, group: dist.ProcessGroup | None) -> bool:
    """Whether memory ran out on all ranks at the same place of a forward pass; called on ranks where it did."""
    frames = traceback.extract_tb(error.__traceback__)
    place = "\n".join(f"{frame.filename}:{frame.lineno}" for frame in frames)
    if any(frame.name in ("backward", "_finish_step", "step") and "torch" in frame.filename for frame in frames):
        place = ""  # in a backward pass or an update
    try:
        return set(everyone(place, group)) == {place} and bool(place)
    except RuntimeError:  # the others are elsewhere
        return False


def exhaustion_factor(profile: Profile, plan: Plan, mem: str | int, factor: float) -> float:
    """The factor on predicted bytes with which a plan no longer fits the budget, from the factor so far."""
    budget = budget_on(profile.cluster, mem or DEFAULT_BUDGET).least
    prediction = evaluate(profile, plain(plan)).prediction
    peak = budget if prediction is None else prediction.peak_memory
    return round(max(_LEAST, factor * _OVER, _OVER * budget / peak), 3)
