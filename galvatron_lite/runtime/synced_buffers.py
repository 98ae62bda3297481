"""Buffers that a forward pass updates from its samples (averages, counters), the same on every rank after a step.

Each pass of a step starts from the buffer before the step; the step's update is the mean, or the sum, of those of all
micro-batches and ranks, as ``SyncBatchNorm`` has it for running statistics. Which it is was found out before the first
step (``verify.trial``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.model.trace_flow import at
from galvatron_lite.runtime.setup import StageRuntime


@dataclass(slots=True)
class _Buffer:
    tensor: Tensor
    before: Tensor
    change: Tensor
    rule: str
    group: dist.ProcessGroup | None


class SyncedBuffers:
    """The buffers of a model's stages that are kept alike.

    Args:
        rules: ``mean`` or ``sum`` by the name of a buffer in the whole model.
    """

    def __init__(self, rules: Mapping[str, str]) -> None:
        self._rules, self._passes = rules, 1
        self._buffers: dict[int, list[_Buffer]] = {}

    def begin(self, runtimes: Sequence[StageRuntime], passes: int) -> None:
        """A step of so many micro-batches begins."""
        self._passes = passes
        self._buffers = {id(runtime): list(self._of(runtime)) for runtime in runtimes} if self._rules else {}

    def _of(self, runtime: StageRuntime) -> Iterator[_Buffer]:
        """Those of the stage's layers; the first layer of a plan of one stage has those that no layer holds, too."""
        paths = {placed.layer.name: placed.layer.modules for placed in runtime.stage}
        for name, rule in self._rules.items():
            holders = [layer for layer, modules in paths.items() if any(at(name, path) for path in modules)]
            loose = not holders and runtime.pipeline is None
            for placed in runtime.stage:
                if placed.layer.name in holders or (loose and placed is runtime.stage[0]):
                    group = runtime.meshes.groups(placed.strategy).batch
                    tensor = runtime.model.get_buffer(name)
                    change = torch.zeros_like(tensor, dtype=torch.float64)
                    yield _Buffer(tensor, tensor.detach().clone(), change, rule, group)

    @contextmanager
    def updating(self, runtime: StageRuntime) -> Iterator[None]:
        """While the forward pass of a micro-batch runs."""
        buffers = self._buffers.get(id(runtime), ())
        for one in buffers:
            one.tensor.copy_(one.before)
        try:
            yield
        finally:  # a stage that is not the last one ends its forward by an exception
            for one in buffers:
                one.change += one.tensor.double() - one.before.double()

    @torch.no_grad()
    def finish(self) -> None:
        """The passes are done: every rank gets the same values. All ranks call it."""
        for one in (one for buffers in self._buffers.values() for one in buffers):
            shares = self._passes
            if one.group is not None:
                dist.all_reduce(one.change, group=one.group)
                shares *= one.group.size()
            change = one.change / shares if one.rule == "mean" else one.change
            value = one.before.double() + change
            one.tensor.copy_(value if one.tensor.is_floating_point() else value.round())
        self._buffers = {}
