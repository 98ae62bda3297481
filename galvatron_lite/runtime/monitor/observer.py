"""Observing the training steps of a model on one rank: measuring them, and making the records of the run's log."""

from __future__ import annotations

import math
import resource
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from statistics import fmean
from time import perf_counter, time
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from galvatron_lite.files import to_data
from galvatron_lite.model.batch import batch_of_call, batch_size
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.store import data_hash
from galvatron_lite.runs.schema import (
    RUN_VERSION,
    EndRecord,
    PlanRecord,
    RankHeader,
    RankRecord,
    Record,
    StepPart,
    StepRecord,
    tokens_of_sample,
)
from galvatron_lite.runtime.monitor.clock import LayerClock, Scalar, StepClock, StepMarks, Tracer

_FIRST_INTERVAL, _LONGEST_INTERVAL = 0.5, 10.0
"""Seconds between two records of a rank; the interval doubles from the first to the longest."""
_SAMPLING = 10
"""Layers are timed in every tenth step, and in the first two steps after each record."""


class Observable:
    """A mixin of models whose training steps can be observed."""

    observer: StepObserver | None = None


def observed(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``train_step(self, batch, optimizer, ...)`` so that the model's observer sees its steps."""

    @wraps(train_step)
    def run(self: Observable, batch: Any, *arguments: Any, **options: Any) -> Any:
        def step() -> Any:
            return train_step(self, batch, *arguments, **options)

        return step() if self.observer is None else self.observer.train(batch, step)

    return run


@dataclass(frozen=True, slots=True)
class _EndedStep:
    """A step that has ended on the host, perhaps not yet on the device."""

    record: StepRecord  # without the seconds and the loss, which are still on the device
    marks: StepMarks
    previous: StepMarks | None  # of the step before
    losses: list[Scalar]
    counts: bool  # towards the means of this rank's records


@dataclass(slots=True)
class _Totals:
    """Sums over the steps since this rank's last record."""

    since: float = field(default_factory=perf_counter)
    interval: float = _FIRST_INTERVAL
    steps: int = 0
    seconds: float = 0.0
    between: float = 0.0
    parts: dict[StepPart, float] = field(default_factory=lambda: defaultdict(float))


class StepObserver:
    """Observes the steps of a model, including those of loops that call the model and the optimizer themselves.

    Args:
        model: the model that trains.
        put: receives the records.
        clock: marks the parts of each step.
        tracer: records traces; None: no traces.
        peak_memory: returns the peak bytes of the fullest rank; 0: not known.
        layers: whether to time the forward passes of blocks.
    """

    def __init__(
        self,
        model: Any,
        put: Callable[[Record], None],
        clock: StepClock,
        tracer: Tracer | None,
        peak_memory: Callable[[], int],
        layers: bool,
    ) -> None:
        self._model, self._rank, self._put, self._clock, self._tracer = model, dist.get_rank(), put, clock, tracer
        self._peak_memory, self._layers = peak_memory, LayerClock(model) if layers else None
        self._plan: Plan = model.plan
        self._next = self._model_step = int(model.step)
        self._samples, self._losses = 0, list[Scalar]()
        self._in_step = self._in_train_step = False
        self._ended: deque[_EndedStep] = deque()
        self._previous: StepMarks | None = None
        self._warm, self._totals = False, _Totals()
        self._updates_model: WeakKeyDictionary[torch.optim.Optimizer, bool] = WeakKeyDictionary()
        self._handles: list[Any] = [  # for loops that call the model, ``backward`` and the optimizer themselves
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward),
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]

    def train(self, batch: Any, step: Callable[[], Tensor]) -> Tensor:
        """Observe a call of ``train_step``. If it raises an error, the error is recorded and the loop may continue."""
        self._in_train_step = True
        self._begin_step()
        self._samples, self._losses = batch_size(batch), []
        try:
            loss = step()
        except BaseException as error:
            self._in_train_step = self._in_step = False
            self._model_step = self._model.step
            self._clock.end_step()
            if self._rank == 0:
                self._put(EndRecord(self._next, time(), f"{type(error).__name__}: {error}"[:500]))
            raise
        self._in_train_step = False
        self._losses = [Scalar(loss)]
        self._end_step()
        return loss

    def close(self) -> None:
        """End the run: remove the hooks and make the last records."""
        for handle in self._handles:
            handle.remove()
        if self._tracer is not None:
            self._tracer.close()
        if self._ended and torch.cuda.is_available():
            torch.cuda.synchronize()
        self._record_ended()
        if self._totals.steps:
            self._record_rank()
        if self._rank == 0:
            self._put(EndRecord(self._next, time()))

    def _begin_step(self) -> None:
        step = int(self._model.step)
        if step != self._model_step:  # a checkpoint was loaded
            self._next = self._model_step = step
        if self._model.plan is not self._plan:
            self._change_plan()
        self._in_step = True
        if self._tracer is not None:
            self._tracer.begin_step(self._next)
        if self._layers is not None:
            self._layers.running = self._warm and (self._totals.steps < 2 or self._next % _SAMPLING == 0)
        self._clock.begin_step()

    def _end_step(self) -> None:
        marks, self._in_step = self._clock.end_step(), False
        profiled = self._is_tracing
        counts = self._warm and self._model.plan is self._plan and not profiled
        tokens = round(self._samples * tokens_of_sample(self._plan))
        record = StepRecord(self._next, round(time(), 3), 0.0, 0.0, self._samples, tokens, profiled=profiled)
        self._ended.append(_EndedStep(record, marks, self._previous, self._losses, counts))
        if self._tracer is not None:
            self._tracer.end_step(self._next)
        # the time after a trace goes to writing it
        self._previous = None if profiled and not self._is_tracing else marks
        self._warm, self._model_step = True, int(self._model.step)
        self._next += 1
        self._samples, self._losses = 0, []
        self._record_ended()

    @property
    def _is_tracing(self) -> bool:
        return self._tracer is not None and self._tracer.is_running

    def _record_ended(self) -> None:
        """Record the steps that have ended on the device too."""
        while self._ended:
            step = self._ended[0]
            if not (step.marks.is_ready and all(loss.is_ready for loss in step.losses)):
                break
            self._record_step(self._ended.popleft())
        totals = self._totals
        if totals.steps and perf_counter() - totals.since > totals.interval:
            self._record_rank()

    def _record_step(self, step: _EndedStep) -> None:
        seconds, between, totals = step.marks.seconds, step.marks.since(step.previous), self._totals
        if step.counts:
            totals.steps += 1
            totals.seconds += seconds
            totals.between += between
            for part, part_seconds in step.marks.parts().items():
                totals.parts[part] += part_seconds
        if self._rank == 0:
            mean = fmean(loss.get() for loss in step.losses) if step.losses else math.nan
            loss, memory = mean if math.isfinite(mean) else None, self._peak_memory()
            seconds, between = round(seconds, 7), round(between, 7)
            self._put(replace(step.record, seconds=seconds, between=between, loss=loss, memory=memory))

    def _record_rank(self) -> None:
        """Record the means of this rank's last steps."""
        totals, self._totals = self._totals, _Totals(interval=min(2 * self._totals.interval, _LONGEST_INTERVAL))
        count = totals.steps
        passes = {} if self._layers is None else self._layers.take()
        allocated = reserved = 0
        if self._model.device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self._model.device)
            reserved = torch.cuda.max_memory_reserved(self._model.device)
        if hasattr(self._model, "watch"):
            self._model.watch.memory = reserved
        self._put(
            RankRecord(
                self._rank,
                step=self._next - 1,
                steps=count,
                seconds=round(totals.seconds / count, 7),
                between=round(totals.between / count, 7),
                parts={part: round(seconds / count, 7) for part, seconds in totals.parts.items()},
                layers={name: round(seconds, 7) for name, seconds in passes.items()},
                memory=allocated,
                reserved=reserved,
                resident=resident_bytes(),
            )
        )

    def _change_plan(self) -> None:
        if self._totals.steps:
            self._record_rank()
        self._plan, self._warm, self._totals = self._model.plan, False, _Totals()
        if self._layers is not None:
            self._layers.close()
            self._layers = LayerClock(self._model)
        if self._model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._model.device)
        digest = plan_digest(self._plan)
        self._put(RankHeader(RUN_VERSION, self._rank, digest, round(time(), 3), self._next))
        if self._rank == 0:
            self._put(PlanRecord(self._next, self._plan, digest))

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if self._in_train_step or not (torch.is_grad_enabled() and model.training):
            return
        if not self._in_step:
            self._begin_step()
        self._samples += batch_size(batch_of_call(args, kwargs))
        self._clock.begin_part(StepPart.FORWARD)

    def _after_forward(self, model: nn.Module, _args: Any, loss: Any) -> None:
        if self._in_train_step or not self._in_step or not (torch.is_grad_enabled() and model.training):
            return
        if isinstance(loss, Tensor):
            self._losses.append(Scalar(loss))
        self._clock.begin_part(StepPart.BACKWARD)

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._ends_step(optimizer):
            self._clock.begin_part(StepPart.OPTIMIZER)

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._ends_step(optimizer):
            self._end_step()

    def _ends_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a loop that calls the model itself ends its step with this optimizer, which updates the model."""
        if self._in_train_step or not self._in_step:
            return False
        if optimizer not in self._updates_model:
            parameters = {id(parameter) for parameter in self._model.parameters()}
            updated = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
            self._updates_model[optimizer] = any(parameter in parameters for parameter in updated)
        return self._updates_model[optimizer]


def resident_bytes() -> int:
    """Peak bytes of this process in host memory (Linux counts them in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def plan_digest(plan: Plan) -> str:
    """A checksum of a plan."""
    return data_hash(to_data(plan))
