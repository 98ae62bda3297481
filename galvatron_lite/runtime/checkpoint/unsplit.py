"""Loading a checkpoint of any plan into the plain model, without other processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from galvatron_lite.parallelism.data.apply import GradientReducer
from galvatron_lite.runtime.checkpoint.manifest import TRAINING, check_files, content_errors, process_file
from galvatron_lite.runtime.checkpoint.optimizer import (
    blank_states,
    check_members,
    check_optimizer,
    put_options,
    put_schedule,
)
from galvatron_lite.runtime.checkpoint.plain import put_state, read_plain
from galvatron_lite.runtime.checkpoint.saving import Resumed
from galvatron_lite.runtime.checkpoint.tensors import check_readable, read_tensors, stored_tensors
from galvatron_lite.runtime.mesh import StrategyGroups
from galvatron_lite.runtime.parameters.managed import ManagedParameter, Updates
from galvatron_lite.runtime.parameters.pieces import Entries, entries_of, held_buffers, held_parameters, held_states
from galvatron_lite.runtime.stages import StageRuntime


@dataclass(slots=True)
class ModelView:
    """What is read of a split model to save and load it; or of a plain one, seen as split over one process."""

    entries: Entries
    runtimes: Sequence[StageRuntime]
    module: Any = None
    plan: Any = None
    step: int = 0
    scaler: Any = None
    steering: Any = None
    streams: Sequence[Any] = ()

    def resume_at(self, step: int) -> None:
        """See ``saving.Saving``."""
        self.step = step


def unsplit(model: nn.Module) -> ModelView:
    """A plain model, seen as one that is split over one process."""
    groups = cast("StrategyGroups", None)
    owned = [ManagedParameter((name,), parameter, None, groups, 1) for name, parameter in model.named_parameters()]
    stage = SimpleNamespace(owned=owned, updates=Updates(owned, GradientReducer(())), stage=(), model=model)
    return ModelView(entries_of(model, ()), [cast("StageRuntime", stage)], model)


def load_into(
    model: nn.Module,
    folder: Path | str,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    data: Any = None,
) -> Resumed:
    """Load a checkpoint of any plan into the plain model; no other process is needed.

    Args:
        model: the one that was trained, not split.
        folder: of the checkpoint.
        optimizer: over its parameters.
        scheduler: of its learning rates.
        data: given the position in the data, where it takes one (``load_state_dict``).

    Raises:
        InputError: it is damaged, or of another model or optimizer.
    """
    place = Path(folder)
    manifest = check_files(place)
    check_optimizer(manifest, optimizer, scheduler)
    with content_errors(place):
        stored, plain = stored_tensors(place, manifest), unsplit(model)
        training, process_state = read_plain(place / TRAINING), read_plain(place / process_file(0))
        held = [*held_parameters(plain), *held_buffers(plain)]
        check_readable(held, stored)
        resumed = Resumed(place, manifest.step, process_state["data"], training["extra"], exact=False)
        if optimizer is not None:
            check_members(plain, optimizer, training["optimizer"])
            blanks = blank_states(plain, manifest, training["optimizer"]["values"])
            put_options(plain, optimizer, training["optimizer"], blanks)
            states = held_states(plain, optimizer)
            check_readable(states, stored)
            held += states
            if scheduler is not None:
                put_schedule(plain, optimizer, scheduler, training["optimizer"])
        put_state(data, process_state["data"])
        read_tensors(held, stored)
    return resumed
