"""Observes the steps of a model on one rank: measures them, and makes records for the sinks."""

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

_FIRST, _LONGEST = 0.5, 10.0
"""Seconds between two records of a rank: at first, and at last; they double."""
_SAMPLED = 10
"""The layers of one in so many steps are timed, beside the first two after each record."""


class Observable:
    """A part of the models that are trained."""

    observer: StepObserver | None = None


def observed(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """A ``train_step(self, batch, optimizer, ...)`` whose steps the model's observer sees."""

    @wraps(train_step)
    def run(self: Observable, batch: Any, *arguments: Any, **options: Any) -> Any:
        def step() -> Any:
            return train_step(self, batch, *arguments, **options)

        return step() if self.observer is None else self.observer.train(batch, step)

    return run


_Pending = tuple[StepRecord, StepMarks, StepMarks | None, list[Scalar], bool]
"""A step that has ended on the host, perhaps not yet on the device: its record without what the device tells, its
marks, those of the step before, its losses, and whether its time counts."""


@dataclass(slots=True)
class _Window:
    """Steps since the last record of this rank."""

    since: float = field(default_factory=perf_counter)
    patience: float = _FIRST
    steps: int = 0
    seconds: float = 0.0
    between: float = 0.0
    parts: dict[StepPart, float] = field(default_factory=lambda: defaultdict(float))


class StepObserver:
    """Observes the steps of a model, also of loops that call the model and the optimizer.

    Args:
        put: takes records.
        tracer: makes traces; None: there are none.
        fullest: peak bytes of the fullest rank, as far as they are known.
        layers: whether the forward passes of blocks are timed.
    """

    def __init__(
        self,
        model: Any,
        put: Callable[[Record], None],
        clock: StepClock,
        tracer: Tracer | None,
        fullest: Callable[[], int],
        layers: bool,
    ) -> None:
        self._model, self._rank, self._put, self._clock, self._tracer = model, dist.get_rank(), put, clock, tracer
        self._fullest, self._layers = fullest, LayerClock(model) if layers else None
        self._plan: Plan = model.plan
        self._next = self._seen = int(model.step)
        self._samples, self._losses = 0, list[Scalar]()
        self._open = self._within = False
        self._pending: deque[_Pending] = deque()
        self._last: StepMarks | None = None
        self._warm, self._window = False, _Window()
        self._ours: WeakKeyDictionary[torch.optim.Optimizer, bool] = WeakKeyDictionary()
        self._handles: list[Any] = [  # of loops that call the model, ``backward`` and the optimizer themselves
            model.register_forward_pre_hook(self._called, with_kwargs=True),
            model.register_forward_hook(self._returned),
            register_optimizer_step_pre_hook(self._updates),
            register_optimizer_step_post_hook(self._updated),
        ]

    def train(self, batch: Any, step: Callable[[], Tensor]) -> Tensor:
        """Observe a call of ``train_step``; where it raises an error, the loop may go on."""
        self._within = True
        self._start()
        self._samples, self._losses = batch_size(batch), []
        try:
            loss = step()
        except BaseException as error:
            self._within = self._open = False
            self._seen = self._model.step
            self._clock.end()
            if self._rank == 0:
                self._put(EndRecord(self._next, time(), f"{type(error).__name__}: {error}"[:500]))
            raise
        self._within = False
        self._losses = [Scalar(loss)]
        self._finish()
        return loss

    def close(self) -> None:
        """The run ends."""
        for handle in self._handles:
            handle.remove()
        if self._tracer is not None:
            self._tracer.close()
        if self._pending and torch.cuda.is_available():
            torch.cuda.synchronize()
        self._settle()
        if self._window.steps:
            self._record()
        if self._rank == 0:
            self._put(EndRecord(self._next, time()))

    def _start(self) -> None:
        now = int(self._model.step)
        if now != self._seen:  # a checkpoint was loaded
            self._next = self._seen = now
        if self._model.plan is not self._plan:
            self._change_plan()
        self._open = True
        if self._tracer is not None:
            self._tracer.begin(self._next)
        if self._layers is not None:
            self._layers.running = self._warm and (self._window.steps < 2 or self._next % _SAMPLED == 0)
        self._clock.begin()

    def _finish(self) -> None:
        marks, self._open = self._clock.end(), False
        profiled = self._profiling
        counts = self._warm and self._model.plan is self._plan and not profiled
        tokens = round(self._samples * tokens_of_sample(self._plan))
        record = StepRecord(self._next, round(time(), 3), 0.0, 0.0, self._samples, tokens, profiled=profiled)
        self._pending.append((record, marks, self._last, self._losses, counts))
        if self._tracer is not None:
            self._tracer.end(self._next)
        # the time after a trace goes to writing it
        self._last = None if profiled and not self._profiling else marks
        self._warm, self._seen = True, int(self._model.step)
        self._next += 1
        self._samples, self._losses = 0, []
        self._settle()

    @property
    def _profiling(self) -> bool:
        return self._tracer is not None and self._tracer.runs

    def _settle(self) -> None:
        """Make records of steps that have ended on the device, too."""
        while self._pending:
            _, marks, _, losses, _ = self._pending[0]
            if not (marks.is_ready and all(loss.is_ready for loss in losses)):
                break
            self._settle_step(*self._pending.popleft())
        window = self._window
        if window.steps and perf_counter() - window.since > window.patience:
            self._record()

    def _settle_step(
        self, record: StepRecord, marks: StepMarks, before: StepMarks | None, losses: list[Scalar], counts: bool
    ) -> None:
        seconds, between = marks.seconds, marks.since(before)
        if counts:
            window = self._window
            window.steps += 1
            window.seconds += seconds
            window.between += between
            for part, part_seconds in marks.parts().items():
                window.parts[part] += part_seconds
        if self._rank == 0:
            mean = fmean(loss.get() for loss in losses) if losses else math.nan
            loss, memory = mean if math.isfinite(mean) else None, self._fullest()
            self._put(replace(record, seconds=round(seconds, 7), between=round(between, 7), loss=loss, memory=memory))

    def _record(self) -> None:
        """Make a record of this rank's last steps."""
        window, self._window = self._window, _Window(patience=min(2 * self._window.patience, _LONGEST))
        count = window.steps
        parts = {part: round(seconds / count, 7) for part, seconds in window.parts.items()}
        passes = {} if self._layers is None else self._layers.take()
        layers = {name: round(seconds, 7) for name, seconds in passes.items()}
        used = reserved = 0
        if self._model.device.type == "cuda":
            used = torch.cuda.max_memory_allocated(self._model.device)
            reserved = torch.cuda.max_memory_reserved(self._model.device)
        if hasattr(self._model, "watch"):
            self._model.watch.memory = reserved
        seconds, between = round(window.seconds / count, 7), round(window.between / count, 7)
        self._put(
            RankRecord(
                self._rank, self._next - 1, count, seconds, between, parts, layers, used, reserved, resident_bytes()
            )
        )

    def _change_plan(self) -> None:
        if self._window.steps:
            self._record()
        self._plan, self._warm, self._window = self._model.plan, False, _Window()
        if self._layers is not None:
            self._layers.close()
            self._layers = LayerClock(self._model)
        if self._model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._model.device)
        digest = plan_digest(self._plan)
        self._put(RankHeader(RUN_VERSION, self._rank, digest, round(time(), 3), self._next))
        if self._rank == 0:
            self._put(PlanRecord(self._next, self._plan, digest))

    def _called(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if self._within or not (torch.is_grad_enabled() and model.training):
            return
        if not self._open:
            self._start()
        self._samples += batch_size(batch_of_call(args, kwargs))
        self._clock.at(StepPart.FORWARD)

    def _returned(self, model: nn.Module, _args: Any, loss: Any) -> None:
        if self._within or not self._open or not (torch.is_grad_enabled() and model.training):
            return
        if isinstance(loss, Tensor):
            self._losses.append(Scalar(loss))
        self._clock.at(StepPart.BACKWARD)

    def _updates(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._open and not self._within and self._is_ours(optimizer):
            self._clock.at(StepPart.OPTIMIZER)

    def _updated(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._open and not self._within and self._is_ours(optimizer):
            self._finish()

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer updates this model."""
        if optimizer not in self._ours:
            ours = {id(parameter) for parameter in self._model.parameters()}
            updated = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
            self._ours[optimizer] = any(parameter in ours for parameter in updated)
        return self._ours[optimizer]


def resident_bytes() -> int:
    """Peak bytes of this process in the host's memory (Linux counts them in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def plan_digest(plan: Plan) -> str:
    """Equal for equal plans."""
    return data_hash(to_data(plan))
