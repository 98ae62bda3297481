"""A model that trains as a plan with branches says, on the launched world."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from galvatron_lite.model.batch import places, slice_batch
from galvatron_lite.model.graph import Layer
from galvatron_lite.runtime.assignment import check_divisible
from galvatron_lite.runtime.branches.parts import Stream
from galvatron_lite.runtime.branches.session import BranchSession, Origins
from galvatron_lite.runtime.branches.setup import set_up_branches
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.parallelize import SetupOptions, StageRuntime


class BranchedModel(ParallelModel):
    """A model whose branches have ranks of their own; used like ``ParallelModel``.

    Args:
        arguments: as for ``ParallelModel``.
        timeout: seconds after which another rank's message that does not come is an error.
        options: as for ``ParallelModel``.

    Attributes:
        trees: the modules of this rank's branches; in ``module``, stand-ins are in their place.
    """

    def __init__(self, *arguments: Any, timeout: float = 600.0, **options: Any) -> None:
        self._timeout = timeout
        super().__init__(*arguments, timeout=timeout, **options)

    def _set_up(self, model: nn.Module, layers: Sequence[Layer], batch: Any, options: SetupOptions) -> StageRuntime:
        self._branches = set_up_branches(model, self.plan, layers, batch, options, self._timeout)
        self.trees = nn.ModuleList(self._branches.trees)
        self._origins: dict[int, Origins] = {}
        return self._branches.setting.runtime

    @property
    def runtimes(self) -> Sequence[StageRuntime]:
        """Of the trunk and of this rank's branches."""
        return self._branches.runtimes

    @property
    def structures(self) -> Sequence[nn.Module]:
        """See ``ParallelModel``."""
        return [self.module, *self.trees]

    @property
    def streams(self) -> Sequence[Stream]:
        """The random numbers of the branches."""
        return list(dict.fromkeys(branch.stream for branch in self._branches.setting.branches.values()))

    def _check_samples(self, samples: int, count: int) -> None:
        degrees = [placed.strategy.batch_degree for part in self._branches.parts for placed in part.stage]
        check_divisible(samples, degrees, count)

    def _parts(self, batch: Any, count: int) -> list[Any]:
        parts = super()._parts(batch, count)
        self._origins = {
            id(part): _origins(part, slice_batch(batch, number * self._rows, (number + 1) * self._rows), self._rows)
            for number, part in enumerate(parts)
        }
        return parts

    def _local_loss(self, part: Any) -> Tensor:
        with self._passing(part) as session:
            return session.settle(super()._local_loss(part))

    def _outputs(self, part: Any) -> Any:
        with self._passing(part) as session:
            return session.deliver(super()._outputs(part))

    @contextmanager
    def _passing(self, part: Any) -> Iterator[BranchSession]:
        setting = self._branches.setting
        setting.session = session = BranchSession(setting, self._rows, self._origins.get(id(part), {}))
        try:
            yield session
        finally:
            setting.session = None


def _origins(part: Any, batch: Any, rows: int) -> Origins:
    """Which tensors of this rank's share of a micro-batch are of which full ones."""
    theirs = dict(places(batch))
    pairs = ((tensor, theirs[place]) for place, tensor in places(part))
    return {id(tensor): (tensor, full) for tensor, full in pairs if full.dim() and full.shape[0] == rows}
