"""What a parallel model has to save itself and to go on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch

from galvatron_lite.runtime.checkpoint.interfaces import ExtraState, Resumed, Saver
from galvatron_lite.runtime.checkpoint.keeper import Checkpointer, SavableModel


class Saving:
    """Saves and loads a model with the state of its training: a part of the models that are trained."""

    step: int = 0  # training steps done: those of ``train_step``, on top of those of the checkpoint that was loaded
    _kept_by: Saver | None = None

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
        """Write a checkpoint that any plan, and the plain model, can be loaded from. All ranks call it.

        The folder is there whole or not at all; one of that name is replaced. All processes must see it. It holds
        the model, the optimizer's states and options, random generators of all ranks, the loss scaler, the plan, and
        what is given.

        Args:
            folder: of this checkpoint alone, beside others: ``checkpoints/step-100``.
            optimizer: over this model's parameters.
            scheduler: of its learning rates.
            data: position in the data: an object with ``state_dict()``, or plain data.
            extra: whatever else, by name, as ``data``; that of rank 0 counts.
            step: training steps done; ``self.step`` if not given.
            asynchronous: copy to host memory, and write while training goes on. An error is raised by the next call
                of ``save``, ``load`` or ``finish_saving``. The process does not end before it is written.
            keep: delete all but so many newest checkpoints beside it, once it is written.

        Raises:
            InputError: it cannot be written (the disk is full); earlier ones are as they were, and training can go on.
            PeerError: another process is gone, failed or hangs.
        """
        asked = ExtraState(optimizer, scheduler, data, extra)
        with self._watched():
            self._saver().save(Path(folder), asked, self.step if step is None else step, keep, asynchronous)

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
        """Go on from a checkpoint of any plan. All ranks call it.

        Under the plan that wrote it every bit is that of the run that was not stopped. What is given is given its state
        (``load_state_dict``); values are in what is returned.

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
        """Go on from the newest whole checkpoint of a folder of checkpoints; None: there is none. See ``load``.

        The newest is the one written last. Damaged ones are named in a warning where a whole one is taken.

        Args:
            folder: of the checkpoints.
            optimizer: as for ``load``.
            scheduler: as for ``load``.
            data: as for ``load``.
            extra: as for ``load``.
            ignore_damaged: return None where all checkpoints are damaged, to begin anew; without it that is an error.

        Raises:
            InputError: see ``load``; or there are damaged checkpoints alone.
            PeerError: another process is gone, failed or hangs.
        """
        asked = ExtraState(optimizer, scheduler, data, extra)
        with self._watched():
            return self._saver().load_latest(Path(folder), asked, ignore_damaged)

    def _saver(self) -> Saver:
        """Made when it is first needed, by all ranks together."""
        if self._kept_by is None:
            self._kept_by = self._new_saver()
        return self._kept_by

    def _watched(self) -> AbstractContextManager[None]:
        """Within it, errors name the rank that is why; where the model does not know, they do not."""
        return nullcontext()

    def _new_saver(self) -> Saver:
        return Checkpointer(cast("SavableModel", self))
