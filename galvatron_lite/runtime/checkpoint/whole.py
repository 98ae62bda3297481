"""Checkpoints and one process: the plain model takes one, and files of Hugging Face are made of one and read."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load

from galvatron_lite.parallelism.data.apply import GradientReducer
from galvatron_lite.runtime.checkpoint.content import blank_states, check_optimizer, give
from galvatron_lite.runtime.checkpoint.interfaces import Resumed
from galvatron_lite.runtime.checkpoint.manifest import TRAINING, check_whole, process_file
from galvatron_lite.runtime.checkpoint.options import check_members, put_options, put_schedule
from galvatron_lite.runtime.checkpoint.plain import read_plain
from galvatron_lite.runtime.checkpoint.planners import PiecesLoader, check_loadable
from galvatron_lite.runtime.checkpoint.sealed import content_errors
from galvatron_lite.runtime.checkpoint.storage import PiecesReader, metadata_of
from galvatron_lite.runtime.mesh import StrategyGroups
from galvatron_lite.runtime.parallelize import StageRuntime
from galvatron_lite.runtime.parameters import Owned, Updates
from galvatron_lite.runtime.pieces import Entries, Held, entries_of, held_buffers, held_parameters, held_states


@dataclass(frozen=True, slots=True)
class _Unsplit:
    """What ``pieces`` asks of the one stage of a plain model."""

    owned: list[Owned]
    updates: Updates
    stage: tuple[()] = ()


@dataclass(frozen=True, slots=True)
class Alone:
    """A plain model, seen as one that is split over one process."""

    entries: Entries
    runtimes: Sequence[StageRuntime]
    structures: Sequence[nn.Module]


def alone(model: nn.Module) -> Alone:
    """A plain model, seen as one that is split over one process."""
    groups = cast("StrategyGroups", None)
    owned = [Owned((name,), parameter, None, groups, 1) for name, parameter in model.named_parameters()]
    unsplit = _Unsplit(owned, Updates(owned, GradientReducer(())))
    return Alone(entries_of(model, ()), [cast("StageRuntime", unsplit)], [model])


def load_into(
    model: nn.Module,
    folder: Path | str,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    data: Any = None,
) -> Resumed:
    """Give a plain model the state of a checkpoint of any plan; no other process is needed.

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
    manifest = check_whole(place)
    check_optimizer(manifest, optimizer, scheduler)
    with content_errors(place):
        metadata, plain = metadata_of(place, manifest), alone(model)
        training, own = read_plain(place / TRAINING), read_plain(place / process_file(0))
        held = [*held_parameters(plain), *held_buffers(plain)]
        check_loadable(held, metadata)
        resumed = Resumed(place, manifest.step, own["data"], training["extra"], exact=False)
        if optimizer is not None:
            check_members(plain, optimizer, training["optimizer"])
            blanks = blank_states(plain, manifest, training["optimizer"]["values"])
            put_options(plain, optimizer, training["optimizer"], blanks)
            held += held_states(plain, optimizer)
            if scheduler is not None:
                put_schedule(plain, optimizer, scheduler, training["optimizer"])
        give(data, own["data"])
        fill(held, metadata)
    return resumed


def fill(held: Sequence[Held], metadata: Metadata) -> None:
    """Read tensors of this process, without others.

    Raises:
        InputError: there is no such tensor, or it has another shape, or a file is damaged.
    """
    check_loadable(held, metadata)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        load({}, storage_reader=PiecesReader(metadata), planner=PiecesLoader(held), no_dist=True)
