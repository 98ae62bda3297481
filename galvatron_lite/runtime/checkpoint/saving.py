"""Saving and loading, as the models that are trained offer it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from galvatron_lite.errors import InputError

if TYPE_CHECKING:
    from galvatron_lite.runtime.checkpoint.checkpointer import Checkpointer, SavableModel


@dataclass(frozen=True, slots=True)
class ExtraState:
    """What is saved beside the model, and where it is put back; see ``Saving.save``."""

    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    data: Any = None
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a run continues from."""

    folder: Path  # of the checkpoint
    step: int  # training steps done
    # position in the data, as it was saved: that of this process, or of rank 0 where there are other processes
    data: Any
    extra: dict[str, Any]  # other saved state, by name
    exact: bool  # whether the plan splits all as the one that wrote it: the run then continues bit for bit


class Saving:
    """Saves and loads a model with the state of its training: a mixin of the models that are trained."""

    streams: Sequence[Any] = ()  # of random numbers, beside the process' generators
    step: int = 0  # training steps done, on top of those of the checkpoint that was loaded
    _looped: int = 0  # those among them of a loop that calls the model, ``backward`` and the optimizer itself
    _called: bool = False  # whether such a loop has called the model to train since the optimizer's last step
    _checkpoints: Checkpointer | None = None

    def note_call(self) -> None:
        """The model is called by itself: if it trains, the optimizer's next step is a training step."""
        self._called |= torch.is_grad_enabled() and bool(self.training)  # type: ignore[attr-defined]

    def note_update(self) -> None:
        """An optimizer has stepped."""
        if self._called:
            self.step, self._looped, self._called = self.step + 1, self._looped + 1, False

    def resume_at(self, step: int) -> None:
        """So many training steps were done when a checkpoint was written that is loaded now."""
        self.step, self._looped, self._called = step, 0, False

    def __reduce_ex__(self, _protocol: object) -> Any:
        """What ``pickle``, ``torch.save`` and ``copy.deepcopy`` call.

        Raises:
            InputError: always.
        """
        remedy = (
            "A rank has a part of it. Call parallel.save(folder, optimizer) on all ranks, or save full_state_dict()."
        )
        raise InputError("pickle or copy", "a split model", remedy)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> None:
        """What ``torch.nn.parallel.DistributedDataParallel`` asks a model first.

        Raises:
            InputError: always.
        """
        remedy = "The plan sums gradients over ranks already: call what auto_parallelize returned as it is."
        raise InputError("DistributedDataParallel", "a split model", remedy)

    def save(
        self,
        folder: Path | str,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        scheduler: Any = None,
        data: Any = None,
        extra: Mapping[str, Any] | None = None,
        step: int | None = None,
        asynchronous: bool = False,
        keep: int | None = None,
    ) -> None:
        """Write a checkpoint that any plan, and the plain model, can load. All ranks call it.

        The folder is complete or not there; one of that name is replaced. All processes must see it. It holds the
        model, the optimizer's states and options, random generators of all ranks, the loss scaler, the plan, and what
        is given.

        Args:
            folder: of this checkpoint alone, beside others: ``checkpoints/step-100``.
            optimizer: over this model's parameters.
            scheduler: of its learning rates.
            data: position in the data: an object with ``state_dict()``, or plain data.
            extra: other state by name, as ``data``; that of rank 0 counts. Averages of ``AveragedModel(parallel)`` are
                saved for all ranks.
            step: training steps done; ``self.step`` if not given.
            asynchronous: copy to host memory, and write while training continues. An error is raised by the next call
                of ``save``, ``load`` or ``finish_saving``. The process does not end before it is written.
            keep: delete all but so many newest checkpoints beside it, once it is written.

        Raises:
            InputError: it cannot be written (the disk is full); earlier ones are unchanged, and training can go on. Or
                ``extra`` holds an optimizer, of which each rank has a part.
            PeerError: another process is gone, failed or hangs.
        """
        for name, value in (extra or {}).items():
            if isinstance(value, torch.optim.Optimizer):
                remedy = "Each rank has a part of its states. Save it as the optimizer of a checkpoint of its own."
                raise InputError(f"extra[{name!r}]", type(value).__name__, remedy)
        state = ExtraState(optimizer, scheduler, data, extra)
        with self._watched():
            self._saver().save(Path(folder).absolute(), state, self.step if step is None else step, keep, asynchronous)

    def finish_saving(self) -> None:
        """Wait until an asynchronous save is on the disk. All ranks call it. Raises what ``save`` does."""
        with self._watched():
            self._saver().finish()

    def load(
        self,
        folder: Path | str,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        scheduler: Any = None,
        data: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Resumed:
        """Continue from a checkpoint of any plan. All ranks call it.

        Under the plan that wrote it the run continues bit for bit. Objects that are given get their saved state
        (``load_state_dict``); plain values are in the result.

        Raises:
            InputError: it is damaged, or of another model or optimizer; nothing is changed.
            PeerError: another process is gone, failed or hangs.
        """
        with self._watched():
            return self._saver().load(Path(folder), ExtraState(optimizer, scheduler, data, extra))

    def load_latest(
        self,
        folder: Path | str,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        scheduler: Any = None,
        data: Any = None,
        extra: Mapping[str, Any] | None = None,
        ignore_damaged: bool = False,
    ) -> Resumed | None:
        """Continue from the newest intact checkpoint of a folder of checkpoints; None if there is none. See ``load``.

        The newest is the one written last. Damaged ones are named in a warning where an intact one is loaded.

        Args:
            folder: of the checkpoints; optimizer, scheduler, data and extra are as for ``load``.
            ignore_damaged: return None where all checkpoints are damaged, to start anew; without it that is an error.

        Raises:
            InputError: see ``load``; or all checkpoints are damaged.
            PeerError: another process is gone, failed or hangs.
        """
        state = ExtraState(optimizer, scheduler, data, extra)
        with self._watched():
            return self._saver().load_latest(Path(folder), state, ignore_damaged)

    def _saver(self) -> Checkpointer:
        """Made on first use, by all ranks together."""
        if self._checkpoints is None:
            self._checkpoints = self._new_saver()
        return self._checkpoints

    def _new_saver(self) -> Checkpointer:
        from galvatron_lite.runtime.checkpoint.checkpointer import Checkpointer

        return Checkpointer(cast("SavableModel", self))

    def _watched(self) -> AbstractContextManager[None]:
        raise NotImplementedError
