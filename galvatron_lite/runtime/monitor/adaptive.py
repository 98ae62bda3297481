"""The monitor, which measures the steps of a model and changes its plan as ``decide`` decides. Every rank runs one.

Ranks communicate once a window of steps: rank 0 gathers the measurements, decides, and broadcasts the decision. It
searches for new plans in another process, which it polls at the end of each window.

If memory is exhausted on all ranks at the same point of a forward pass, nothing was updated and no rank waits for
another, so training continues from the tensors in memory under a plan that needs less memory. In all other cases (on
some ranks only, in backward, in the optimizer) other ranks wait in collectives. Then an error is raised, the log keeps
the memory factor, and the restarted run plans with it and loads its last checkpoint.
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
from galvatron_lite.runtime.monitor.decide import AS_PROFILED, begin, decide, wants_links, write_record
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

_TIMED_STEPS = 3
"""Last steps of a window, whose layers are timed."""
_REPETITIONS = 9
"""Measurements of a link. The second fastest counts: other traffic makes a transfer slower, nothing makes it faster."""
PATIENCE = timedelta(seconds=10)
"""How long a rank whose memory is exhausted waits to learn whether that of all others is, too."""
_LEAST_FACTOR, _MARGIN = 1.1, 1.02
"""Least memory factor after memory was exhausted, and by what factor the plan then exceeds its budget."""

RankMeasurement = tuple[tuple[float, ...], dict[str, float], int]
"""A window on one rank: seconds of each step, median forward seconds by block, and peak bytes (0: not known)."""


class Monitor:
    """Trains the steps of a model and adapts its plan; see ``schema.Adapt``. All ranks create it together.

    Args:
        parallel: the model, split by a plan that was predicted by the profile.
        profile: uncorrected.
        settings: of adaptation.
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
        started = Started(LOG_VERSION, settings, profile, parallel.plan, corrections=corrections)
        self._decider = _Decider(started) if dist.get_rank() == 0 else None

    @property
    def phase(self) -> None:
        """None: it trains without phases."""

    @property
    def decisions(self) -> Sequence[Decision]:
        """The decisions so far on rank 0; empty on other ranks."""
        return () if self._decider is None else self._decider.decisions

    def train_step(self, batch: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> Tensor:
        """Train one step; after the last step of a window, decide on the plan."""
        settings = self._settings
        self._clock.running = len(self._seconds) >= settings.window - _TIMED_STEPS
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
        """Train one step; if memory is exhausted on all ranks, repeat it under a plan that needs less."""
        while True:
            try:
                return self._parallel.plain_step(batch, optimizer, max_grad_norm)
            except EXHAUSTED as error:
                on_all_ranks = _is_exhausted_everywhere(error, self._group)
                # free gradients, and activations that the frames of the error hold
                traceback.clear_frames(error.__traceback__)
                optimizer.zero_grad(set_to_none=True)
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                refusal = self._reduce_memory(optimizer) if on_all_ranks else self._log_exhausted()
                if refusal:
                    raise ExhaustedError(f"Memory ran out in step {self.step}. {refusal}") from error

    def _reduce_memory(self, optimizer: torch.optim.Optimizer) -> str:
        """Switch to a plan that needs less memory. Return the reason if that is impossible, else an empty string."""
        decider = self._decider
        plan, error = from_rank_zero(lambda: (None, "") if decider is None else decider.exhausted(self.step))
        if plan is None:
            return (
                f"No plan takes less: {error}. Use more devices, a smaller batch, or host memory (--fix offload=...)."
            )
        refusal = self._switch(optimizer, plan)
        self._seconds.clear()
        return refusal

    def _log_exhausted(self) -> str:
        """Log that memory is exhausted on this rank, and return the remedy."""
        factor = _exhaustion_factor(self._profile, self._parallel.plan, self._settings.mem, 1.0)
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
        measurements: list[RankMeasurement] = everyone((tuple(self._seconds), self._clock.take(), memory))
        self._seconds.clear()
        window = _window_of(self.step, measurements, self._names, self._parallel.plan)
        if from_rank_zero(lambda: decider is not None and wants_links(decider.state, window)):
            window = replace(window, links=_measure_links(self._probes, device))
        plan: Plan | None = from_rank_zero(lambda: decider and decider.decide(window))
        if plan is not None:
            self._switch(optimizer, plan)

    def _switch(self, optimizer: torch.optim.Optimizer, plan: Plan) -> str:
        """Switch to a plan. If a rank cannot, keep the current plan and return the error, else an empty string."""
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
    """The state of decisions, the planning process and the log, all on rank 0 only."""

    def __init__(self, started: Started) -> None:
        self.state = begin(started)
        self.decisions: list[Decision] = []
        self._planning: PlanningProcess | None = None
        self._log = started.settings.log
        write_record(self._log, started)

    def feed(self, event: Event) -> Decision | None:
        """Update the state with an event, and log the event and the decision."""
        write_record(self._log, event)
        self.state, decision = decide(self.state, event)
        if decision is not None:
            self.decisions.append(decision)
            write_record(self._log, Decided(decision))
        return decision

    def decide(self, window: StepWindow) -> Plan | None:
        """Return the plan to switch to after a window; None: keep the current plan."""
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
        """Return a plan that needs less memory than the current one, or the error of the search."""
        state = self.state
        if self._planning is not None:
            self._planning.stop()
            self._planning = None
        factor = _exhaustion_factor(state.profile, state.plan, state.settings.mem, state.corrections.memory)
        self.feed(Exhausted(step, tuple(range(dist.get_world_size())), factor))
        reply = answer(self.state.query(step))
        self.feed(reply)
        return self.state.target, reply.error


def _window_of(step: int, measurements: Sequence[RankMeasurement], names: list[str], plan: Plan) -> StepWindow:
    """Combine the measurements of all ranks; ``names`` are those of all layers, in order."""
    steps, layers, memory = zip(*measurements, strict=True)
    slowest = [max(seconds) for seconds in zip(*steps, strict=True)]
    first, middle, third = quantiles(slowest, n=4) if len(slowest) > 1 else slowest * 3
    groups = []
    for run in (run for stage in plan.stages for run in stage.runs):
        members = names[names.index(run.first) : names.index(run.first) + run.count]
        seconds = {
            rank: sum(passes[layer] for layer in members)
            for rank, passes in enumerate(layers)
            if passes.keys() >= set(members)
        }
        if seconds:
            groups.append(LayerGroup(run.first, tuple(seconds), tuple(seconds.values())))
    return StepWindow(step, (first, middle, third), tuple(groups), memory if all(memory) else ())


def _measure_links(
    probes: Sequence[tuple[LinkPoint, dist.ProcessGroup | None]], device: torch.device
) -> tuple[LinkPoint, ...]:
    """Measure the links, each on this rank's group of its level. All ranks call it and get the same result.

    Collectives inside a step say little about a link, as each waits for the last rank to call it.
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
    """Time a call that all ranks start together."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    dist.barrier()
    synchronize()
    before = perf_counter()
    call()
    synchronize()
    return perf_counter() - before


def _is_exhausted_everywhere(error: BaseException, group: dist.ProcessGroup | None) -> bool:
    """Whether memory is exhausted on all ranks at the same point of a forward pass; called where it is."""
    frames = traceback.extract_tb(error.__traceback__)
    point = "\n".join(f"{frame.filename}:{frame.lineno}" for frame in frames)
    if any(frame.name in ("backward", "_finish_step", "step") and "torch" in frame.filename for frame in frames):
        point = ""  # in a backward pass or an update
    try:
        return set(everyone(point, group)) == {point} and bool(point)
    except RuntimeError:  # other ranks did not call it
        return False


def _exhaustion_factor(profile: Profile, plan: Plan, mem: str | int, factor: float) -> float:
    """The factor on predicted bytes by which a plan no longer fits the budget, larger than the factor so far."""
    budget = budget_on(profile.cluster, mem or DEFAULT_BUDGET).least
    prediction = evaluate(profile, plain(plan)).prediction
    peak = budget if prediction is None else prediction.peak_memory
    return round(max(_LEAST_FACTOR, factor * _MARGIN, _MARGIN * budget / peak), 3)
