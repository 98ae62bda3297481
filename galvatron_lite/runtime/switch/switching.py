"""The part of a ``ParallelModel`` that changes its plan."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from galvatron_lite.plans.io import read_plan
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.parallelize import SetupOptions, StageRuntime
from galvatron_lite.runtime.parameter_use import ParameterUse
from galvatron_lite.runtime.scaling import LossScaler
from galvatron_lite.runtime.stage_calls import Calls
from galvatron_lite.runtime.switch.change import SwitchableModel
from galvatron_lite.runtime.switch.live import Switched, switch
from galvatron_lite.runtime.watch.notes import StepPhase


class Switching:
    """What ``ParallelModel`` has of it."""

    plan: Plan
    runtime: StageRuntime
    scaler: LossScaler | None
    copies: nn.ModuleList
    use: ParameterUse
    _runtimes: list[StageRuntime]
    _compute: torch.dtype | None
    _calls: Calls

    def switch(
        self, plan: Plan | Path | str, optimizer: torch.optim.Optimizer, scheduler: Any = None, **options: Any
    ) -> Switched:
        """Train on under another plan (or the file that holds it), between two steps; all ranks call it.

        See ``runtime.switch.live.switch``.
        """
        wanted = plan if isinstance(plan, Plan) else read_plan(plan)
        with self._watched(StepPhase.SWITCHING):
            return switch(cast("SwitchableModel", self), optimizer, wanted, scheduler, **options)

    def adopt(self, plan: Plan, runtimes: Sequence[StageRuntime], options: SetupOptions) -> None:
        """Be split by another plan from now on; what that takes is ``switch``'s to do."""
        scaled = options.compute is torch.float16
        self.plan, self._compute, self._calls = plan, options.compute, replace(self._calls, compute=options.compute)
        self.scaler = (self.scaler or LossScaler(self._norm, self._multiply)) if scaled else None
        self._runtimes, self.runtime = list(runtimes), runtimes[0]
        self.copies = nn.ModuleList(runtime.model for runtime in runtimes[1:])
        self.use = ParameterUse(runtimes, plan)

    def _watched(self, phase: StepPhase) -> AbstractContextManager[None]:
        raise NotImplementedError

    def _norm(self) -> Tensor:
        raise NotImplementedError

    def _multiply(self, factor: Tensor) -> None:
        raise NotImplementedError
