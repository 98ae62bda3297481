"""Sees the steps of a model on one rank: takes their times, and hands records to what writes and shows them."""

from __future__ import annotations

import math
import resource
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from time import perf_counter, time
from typing import Any
from weakref import WeakKeyDictionary

import torch
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
from galvatron_lite.runtime.live.clock import Scalar, StepClock, Taken
from galvatron_lite.runtime.watch.notes import StepPhase

_FIRST, _LONGEST = 0.5, 10.0
"""Seconds between two records of a rank: at first, and at last; they double."""
_SAMPLED = 10
"""Of so many steps the layers of one are timed, beside the first two behind each record."""


@dataclass(slots=True)
class _Done:
    """A step that is done on the host, and perhaps not yet on the device."""

    step: int
    time: float
    taken: Taken
    before: Taken | None
    samples: int
    loss: list[Scalar]
    profiled: bool
    counts: bool

    @property
    def is_ready(self) -> bool:
        return self.taken.is_ready and all(loss.is_ready for loss in self.loss)


@dataclass(slots=True)
class _Window:
    """Steps since the last record of this rank."""

    since: float = field(default_factory=perf_counter)
    patience: float = _FIRST
    steps: int = 0
    seconds: float = 0.0
    between: float = 0.0
    parts: dict[StepPart, float] = field(default_factory=dict)

    def add(self, seconds: float, between: float, parts: dict[StepPart, float]) -> None:
        """A step more."""
        self.steps, self.seconds, self.between = self.steps + 1, self.seconds + seconds, self.between + between
        for part, own in parts.items():
            self.parts[part] = self.parts.get(part, 0.0) + own

    def next(self) -> _Window:
        """The window behind it."""
        return _Window(patience=min(2 * self.patience, _LONGEST))


class Watcher:
    """The observer of a model; see ``observed.Observer``. Also of loops that call the model and the optimizer.

    Args:
        made: the model.
        rank: of this process.
        put: takes records.
        clock: takes the times.
        timed: makes the clock of layers for the plan that is in force; gives None where there is none.
        tracer: makes traces; None: there are none.
        fullest: peak bytes of the fullest rank, as far as they are known.
    """

    def __init__(
        self,
        model: Any,
        rank: int,
        put: Callable[[Record], None],
        clock: StepClock,
        timed: Callable[[], Any],
        tracer: Any,
        fullest: Callable[[], int],
    ) -> None:
        self._made, self._rank, self._put, self._clock, self._tracer = model, rank, put, clock, tracer
        self._timed, self._layers, self._fullest = timed, timed(), fullest
        self._plan: Plan = model.plan
        self._next = self._seen = int(model.step)
        self._samples, self._losses = 0, list[Scalar]()
        self._open = self._within = False
        self._pending: deque[_Done] = deque()
        self._last: Taken | None = None
        self._warm, self._window = False, _Window()
        self._own: WeakKeyDictionary[torch.optim.Optimizer, bool] = WeakKeyDictionary()
        self._handles = self._hooks()

    @property
    def step(self) -> int:
        """The number of the step that is under way, or comes next."""
        return self._next

    def begin(self, batch: Any) -> None:
        """``train_step`` begins."""
        self._within = True
        self._start()
        self._samples, self._losses = batch_size(batch), []

    def end(self, loss: Tensor) -> None:
        """``train_step`` is done."""
        self._within = False
        self._losses = [Scalar(loss)]
        self._finish()

    def failed(self, error: BaseException) -> None:
        """``train_step`` was not done; the error may end the process, or the loop may go on."""
        self._within = self._open = False
        self._seen = self._made.step
        if self._rank == 0:
            self._put(EndRecord(self._next, time(), f"{type(error).__name__}: {error}"[:500]))

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
        now = int(self._made.step)
        if now != self._seen:  # a checkpoint was loaded
            self._next = self._seen = now
        if self._made.plan is not self._plan:
            self._changed()
        self._open = True
        if self._tracer is not None:
            self._tracer.begin(self._next)
        if self._layers is not None:
            self._layers.running = self._warm and (self._window.steps < 2 or self._next % _SAMPLED == 0)
        self._clock.begin()

    def _finish(self) -> None:
        taken, self._open = self._clock.end(), False
        counts = self._warm and self._made.plan is self._plan and not self._profiling
        done = _Done(
            self._next, time(), taken, self._last, self._samples, self._losses, self._profiling, counts
        )  # fmt: skip
        if self._tracer is not None:
            self._tracer.end(self._next)
        # writing a trace is not what lies between steps
        self._last = None if done.profiled and not self._profiling else taken
        self._warm, self._seen = True, int(self._made.step)
        self._next += 1
        self._samples, self._losses = 0, []
        self._pending.append(done)
        self._settle()

    @property
    def _profiling(self) -> bool:
        return self._tracer is not None and self._tracer.runs

    def _settle(self) -> None:
        """Make records of steps that the device is done with too."""
        while self._pending and self._pending[0].is_ready:
            self._settled(self._pending.popleft())
        window = self._window
        if window.steps and perf_counter() - window.since > window.patience:
            self._record()

    def _settled(self, done: _Done) -> None:
        seconds, between = done.taken.seconds, done.taken.since(done.before)
        if done.counts:
            self._window.add(seconds, between, done.taken.parts())
        if self._rank == 0:
            tokens = round(done.samples * tokens_of_sample(self._plan))
            loss = fmean(one.get() for one in done.loss) if done.loss else math.nan
            known = loss if math.isfinite(loss) else None
            self._put(
                StepRecord(
                    done.step, round(done.time, 3), round(seconds, 7), round(between, 7), done.samples, tokens, known,
                    self._fullest(), done.profiled,
                )
            )  # fmt: skip

    def _record(self) -> None:
        """A record of this rank's last steps."""
        window, self._window = self._window, self._window.next()
        count = window.steps
        parts = {part: round(seconds / count, 7) for part, seconds in window.parts.items()}
        layers = {} if self._layers is None else {name: round(own, 7) for name, own in self._layers.take().items()}
        used, held = peaks(self._made.device)
        if hasattr(self._made, "watch"):
            self._made.watch.memory = held
        seconds, between = round(window.seconds / count, 7), round(window.between / count, 7)
        self._put(
            RankRecord(self._rank, self._next - 1, count, seconds, between, parts, layers, used, held, resident())
        )

    def _changed(self) -> None:
        """The plan is another one."""
        if self._window.steps:
            self._record()
        self._plan, self._warm, self._window = self._made.plan, False, _Window()
        if self._layers is not None:
            self._layers.close()
        self._layers = self._timed()
        if self._made.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._made.device)
        digest = digest_of(self._plan)
        self._put(RankHeader(RUN_VERSION, self._rank, digest, round(time(), 3), self._next))
        if self._rank == 0:
            self._put(PlanRecord(self._next, self._plan, digest))

    def _hooks(self) -> list[Any]:
        """Of loops that call the model, ``backward`` and the optimizer by themselves."""
        model: nn.Module = self._made
        return [
            model.register_forward_pre_hook(self._called, with_kwargs=True),
            model.register_forward_hook(self._returned),
            register_optimizer_step_pre_hook(self._updates),
            register_optimizer_step_post_hook(self._updated),
        ]

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
        if self._open and not self._within and self._is_own(optimizer):
            self._clock.at(StepPart.OPTIMIZER)

    def _updated(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._open and not self._within and self._is_own(optimizer):
            self._finish()

    def _is_own(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer updates this model."""
        if optimizer not in self._own:
            own = {id(one) for one in self._made.parameters()}
            self._own[optimizer] = any(id(one) in own for group in optimizer.param_groups for one in group["params"])
        return self._own[optimizer]

    def phase(self, phase: StepPhase | None) -> None:
        """What ``Watch`` comes to."""
        if not self._open:
            return
        if phase is None:
            self._clock.at(StepPart.WAITING)
        else:
            self._clock.phase(phase)


def peaks(device: torch.device) -> tuple[int, int]:
    """Peak bytes in tensors, and those that the allocator held; 0 where it does not tell."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def resident() -> int:
    """Peak bytes of this process in the host's memory (Linux counts them in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def digest_of(plan: Plan) -> str:
    """The same for the same plan."""
    return data_hash(to_data(plan))
