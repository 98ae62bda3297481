"""The methods with which models that train in parallel save and load checkpoints."""

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
    """The state that is saved beside the model, and restored into the same objects; see ``Saving.save``."""

    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    data: Any = None
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Resumed:
    """The checkpoint that a run resumes from."""

    folder: Path  # of the checkpoint
    step: int  # training steps done
    data: Any  # saved position in the data: of this process, or of rank 0 if the number of processes has changed
    extra: dict[str, Any]  # other saved state, by name
    exact: bool  # whether the plan splits all as the one that wrote it, so that the run continues bit for bit


class Saving:
    """A mixin of models that saves and loads them with the state of their training."""

    streams: Sequence[Any] = ()  # random streams beside the generators of the process
    step: int = 0  # training steps done, including those before the checkpoint that was loaded
    _looped: int = 0  # steps since then of a loop that calls the model, ``backward`` and the optimizer itself
    _called: bool = False  # whether such a loop has called the model to train since the optimizer's last step
    _checkpoints: Checkpointer | None = None

    def note_call(self) -> None:
        """Note a call of the model: if it trains, the optimizer's next step is a training step."""
        self._called |= torch.is_grad_enabled() and bool(self.training)  # type: ignore[attr-defined]

    def note_update(self) -> None:
        """Note a step of an optimizer."""
        if self._called:
            self.step, self._looped, self._called = self.step + 1, self._looped + 1, False

    def resume_at(self, step: int) -> None:
        """Set the number of training steps done, from a checkpoint."""
        self.step, self._looped, self._called = step, 0, False

    def __reduce_ex__(self, _protocol: object) -> Any:
        """Refuse ``pickle``, ``torch.save`` and ``copy.deepcopy``.

        Raises:
            InputError: always.
        """
        remedy = (
            "A rank has a part of it. Call parallel.save(folder, optimizer) on all ranks, or save full_state_dict()."
        )
        raise InputError("pickle or copy", "a split model", remedy)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> None:
        """Refuse ``torch.nn.parallel.DistributedDataParallel``, which reads this attribute first.

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

        The folder must be visible to all processes. It is complete or absent; a folder of that name is replaced. It
        contains the model, the optimizer's states and options, the random generators of all ranks, the loss scaler,
        the plan, and the state passed here.

        Args:
            folder: of this checkpoint alone, beside others: ``checkpoints/step-100``.
            optimizer: over this model's parameters.
            scheduler: of its learning rates.
            data: position in the data of this process: an object with ``state_dict()``, or plain data.
            extra: other state of rank 0 by name, as ``data``. Averages of ``AveragedModel(parallel)`` are saved for
                all ranks.
            step: training steps done; default: ``self.step``.
            asynchronous: copy to host memory, and write while training continues. An error is raised by the next call
                of ``save``, ``load`` or ``finish_saving``. The process does not end before the checkpoint is written.
            keep: number of checkpoints to keep beside this one and including it; older ones are deleted.

        Raises:
            InputError: it cannot be written (the disk is full), and earlier checkpoints are unchanged; or ``extra``
                contains an optimizer, of which each rank has only a part.
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
        """Wait until an asynchronous save is on disk, and raise its error if it failed. All ranks call it."""
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

        Under the plan that wrote it the run continues bit for bit. The saved state is loaded into the objects passed
        here (``load_state_dict``); plain values are in the result. For the arguments see ``save``.

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
        """Continue from the last intact checkpoint written to a folder of checkpoints; see ``load``.

        A warning names the damaged checkpoints that are skipped.

        Args:
            folder: of the checkpoints.
            optimizer, scheduler, data, extra: see ``load``.
            ignore_damaged: return None if all checkpoints are damaged, instead of raising an error.

        Returns:
            None if there is no checkpoint.

        Raises:
            InputError: see ``load``; or all checkpoints are damaged.
            PeerError: another process is gone, failed or hangs.
        """
        state = ExtraState(optimizer, scheduler, data, extra)
        with self._watched():
            return self._saver().load_latest(Path(folder), state, ignore_damaged)

    def _saver(self) -> Checkpointer:
        """The checkpointer; all ranks create it together on first use."""
        if self._checkpoints is None:
            self._checkpoints = self._new_saver()
        return self._checkpoints

    def _new_saver(self) -> Checkpointer:
        from galvatron_lite.runtime.checkpoint.checkpointer import Checkpointer

        return Checkpointer(cast("SavableModel", self))

    def _watched(self) -> AbstractContextManager[None]:
        raise NotImplementedError
