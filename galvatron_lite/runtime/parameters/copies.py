"""Made of a split model: copies of its parameters for averages (``AveragedModel``), and a model that only runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError

if TYPE_CHECKING:
    from galvatron_lite.runtime.engine import ParallelModel


class ParameterCopies(nn.Module):
    """A ``copy.deepcopy`` of a split model: copies of its ``parameters()`` and ``buffers()``, in their order."""

    def __init__(self, parallel: ParallelModel) -> None:
        super().__init__()
        self._parallel = [parallel]  # in a list: it is no part of this module
        self.values = nn.ParameterList(
            nn.Parameter(one.detach().clone(), one.requires_grad) for one in parallel.parameters()
        )
        for number, buffer in enumerate(parallel.buffers()):
            self.register_buffer(f"buffer{number}", buffer.detach().clone())

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        """There is no split model of these values.

        Raises:
            InputError: always.
        """
        remedy = "Load its full_state_dict() into the model (parallel.load_full_state_dict), or into an unsplit one."
        raise InputError("call of the model", "copies of parameters", remedy)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's ``state_dict()`` with these values, on the CPU of every rank; all ranks call it."""
        with self._swapped():
            return self._parallel[0].full_state_dict()

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        (parallel,) = self._parallel
        parallel.publish()
        held = [*parallel.parameters(), *parallel.buffers()]
        before = [one.detach().clone() for one in held]
        try:
            self._set(held, [*self.parameters(), *self.buffers()])
            yield
        finally:
            self._set(held, before)

    @torch.no_grad()
    def _set(self, held: Iterable[Tensor], values: Iterable[Tensor]) -> None:
        (parallel,) = self._parallel
        for one, value in zip(held, values, strict=True):
            one.copy_(value)
        for runtime in parallel.runtimes:
            runtime.updates.due = runtime.updates.is_needed
        parallel.publish()


class InferenceModel(nn.Module):
    """Called like the model, or with a batch, alike on every rank; gives the model's own outputs, without gradients."""

    def __init__(self, parallel: ParallelModel) -> None:
        super().__init__()
        self.parallel = parallel
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs; see ``ParallelModel.outputs``."""
        return self.parallel.outputs(*args, **kwargs)
