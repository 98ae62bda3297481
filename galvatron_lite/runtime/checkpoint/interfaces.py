"""What is asked of who saves a model, and what is given back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class ExtraState:
    """What is saved beside the model, and where it is put back."""

    optimizer: torch.optim.Optimizer | None = None  # over the model's parameters
    scheduler: Any = None  # of its learning rates
    data: Any = None  # position in the data of this process: an object with ``state_dict()``, or plain data
    extra: Mapping[str, Any] | None = None  # whatever else, by name, as ``data``; that of rank 0 counts


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a run goes on from."""

    folder: Path  # of the checkpoint
    step: int  # training steps done
    # position in the data, as it was saved: that of this process, or of rank 0 where there are other processes
    data: Any
    extra: dict[str, Any]  # what else was saved, by name
    exact: bool  # whether the plan splits all as the one that wrote it: the run then goes on bit for bit


class Saver(Protocol):
    """Writes and reads the checkpoints of a model; all ranks call its methods together."""

    def save(self, place: Path, extra_state: ExtraState, step: int, keep: int | None, asynchronous: bool) -> None:
        """Write a checkpoint; see ``Saving.save``."""
        ...

    def finish(self) -> None:
        """Wait until what is being written is on the disk. Raises what ``save`` does."""
        ...

    def load(self, folder: Path, extra_state: ExtraState) -> Resumed:
        """Take a checkpoint; see ``Saving.load``."""
        ...

    def load_latest(self, folder: Path, extra_state: ExtraState, ignore_damaged: bool = False) -> Resumed | None:
        """Take the newest whole checkpoint of a folder; None: there is none."""
        ...
