"""Scalars for TensorBoard, where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from galvatron_lite.plans.schema import Plan
from galvatron_lite.runs.schema import PlanRecord, Record, StepRecord, measured, predicted

FOLDER = "tensorboard"
_PAUSE = 1.0
"""Seconds between two steps that are written: it takes time from training."""


def writer(folder: Path) -> Any:
    """What writes scalars into a folder; None where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(log_dir=str(folder))


class Scalars:
    """Writes steps as scalars; a sink of ``Recorder``.

    Args:
        to: a ``SummaryWriter``.
        plan: under which training begins.
    """

    def __init__(self, to: Any, plan: Plan) -> None:
        self._to, self._plan, self._written = to, plan, -_PAUSE

    def take(self, records: Sequence[Record]) -> None:
        """Steps that were trained, or another plan."""
        for record in records:
            if isinstance(record, PlanRecord):
                self._plan = record.plan
            elif isinstance(record, StepRecord) and monotonic() - self._written >= _PAUSE:
                self._write(record)

    def close(self) -> None:
        """There are no more."""
        self._to.close()

    def _write(self, step: StepRecord) -> None:
        self._written = monotonic()
        now, wanted = measured([step], self._plan), predicted(self._plan)
        pairs = {
            "seconds": (now.seconds, wanted.seconds),
            "samples_per_second": (now.samples, wanted.samples),
            "tokens_per_second": (now.tokens, wanted.tokens),
            "mfu": (now.mfu, wanted.mfu),
            "memory_bytes": (now.memory, wanted.memory),
        }
        found = {"loss": step.loss} if step.loss is not None else {}
        for name, (own, other) in pairs.items():
            found |= {f"{name}/measured": own} if own else {}
            found |= {f"{name}/predicted": other} if other else {}
        for name, value in found.items():
            self._to.add_scalar(name, value, global_step=step.step, walltime=step.time)
