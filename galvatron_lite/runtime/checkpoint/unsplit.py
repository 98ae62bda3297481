"""Loading a checkpoint of any plan into the plain model in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from galvatron_lite.parallelism.data.apply import GradientReducer
from galvatron_lite.runtime.checkpoint.checkpointer import Checkpointer
from galvatron_lite.runtime.checkpoint.saving import ExtraState, Resumed
from galvatron_lite.runtime.mesh import StrategyGroups
from galvatron_lite.runtime.parameters.managed import ManagedParameter, Updates
from galvatron_lite.runtime.parameters.pieces import Entries, entries_of
from galvatron_lite.runtime.stages import StageRuntime


@dataclass(slots=True)
class UnsplitModel:
    """A plain model with the interface of a model that is split over one process."""

    entries: Entries
    runtimes: Sequence[StageRuntime]
    module: nn.Module
    plan: Any = None
    step: int = 0
    scaler: Any = None
    steering: Any = None
    streams: Sequence[Any] = ()

    def resume_at(self, step: int) -> None:
        """See ``saving.Saving``."""
        self.step = step


def unsplit(model: nn.Module) -> UnsplitModel:
    """Wrap a plain model in the interface of a model that is split over one process."""
    groups = cast("StrategyGroups", None)
    owned = [ManagedParameter((name,), parameter, None, groups, 1) for name, parameter in model.named_parameters()]
    stage = SimpleNamespace(owned=owned, updates=Updates(owned, GradientReducer(())), stage=(), model=model)
    return UnsplitModel(entries_of(model, ()), [cast("StageRuntime", stage)], model)


def load_into(
    model: nn.Module,
    folder: Path | str,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    data: Any = None,
) -> Resumed:
    """Load a checkpoint of any plan into the plain model. One process is enough.

    Args:
        model: the model that was trained, not split.
        folder: of the checkpoint.
        optimizer: over its parameters.
        scheduler: of its learning rates.
        data: gets the saved position in the data, if it has ``load_state_dict``.

    Raises:
        InputError: the checkpoint is damaged, or of another model or optimizer.
    """
    state = ExtraState(optimizer, scheduler, data)
    return Checkpointer(unsplit(model), timeout=None).load(Path(folder), state)
