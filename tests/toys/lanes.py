"""A dimension that splits modules itself: lanes of devices share the samples inside of layers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.model.graph import LayerKind
from galvatron_lite.parallelism.axes import MeshAxis, Part, Purpose
from galvatron_lite.parallelism.base import (
    AvailableDevices,
    Chosen,
    Communication,
    Dimension,
    DimensionContext,
    LayerWork,
    Moment,
)
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.process_groups import all_gather
from galvatron_lite.parallelism.ranks import Either, group_along
from galvatron_lite.parallelism.strategy import Strategy


class _Exchange(Function):
    """All samples become this rank's share of them (``shares``), or shares become all; backward does the opposite."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, shares: bool) -> Tensor:
        ctx.group, ctx.shares, ranks = group, shares, dist.get_world_size(group)
        if shares:
            return tensor.chunk(ranks)[dist.get_rank(group)].clone()
        output = tensor.new_empty(ranks * tensor.shape[0], *tensor.shape[1:])
        all_gather(output, tensor.contiguous(), group)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _Exchange.apply(gradients[0], ctx.group, not ctx.shares), None, None


@dataclass(frozen=True, slots=True)
class LaneDimension(Dimension):
    """Lanes that have all activations between layers, and each run a share of the samples inside."""

    name: str = "lanes"
    degree: str = "lanes"
    means: str = "lanes, each with its own samples inside of layers"
    aliases: tuple[str, ...] = ("tracks",)

    axes = (MeshAxis("lanes", Part.SAMPLES, replicates=True),)
    purposes = (Purpose.ACTIVATIONS,)
    sums = False

    def choices(self, kind: LayerKind, devices: int) -> Sequence[dict[str, object]]:
        """Every divisor of the devices."""
        return [{"lanes": degree} for degree in divisors(devices)]

    def allows(self, kind: LayerKind, chosen: Chosen, room: AvailableDevices) -> bool:
        """All devices of the stage, or none."""
        return chosen["lanes"] in (1, room.devices)

    def fault(self, strategy: Strategy) -> tuple[str, str] | None:
        """Copies lie on the innermost ranks, and added dimensions are the outermost: they are both."""
        return None if getattr(strategy, self.name) in (1, strategy.devices) else ("lanes", "Lanes take all devices.")

    def layout(self, strategy: Strategy) -> dict[str, int]:
        """Copies, instead of shares of the samples."""
        return {}

    def apply(self, work: LayerWork, kind: LayerKind, strategy: Either, context: DimensionContext) -> LayerWork:
        """Fewer samples; outputs, and gradients of inputs, are gathered."""
        degree, size = getattr(strategy, self.name), kind.output_bytes * work.samples
        group = group_along(strategy, self.name)
        gathers = (
            Communication(Collective.ALL_GATHER, size, group, moment, overlaps=False, count=degree > 1, cause=self.name)
            for moment in (Moment.FORWARD, Moment.BACKWARD)
        )
        return replace(work.with_communications(*gathers), samples=work.samples / degree)

    def split_module(self, module: Any, group: Any) -> None:
        """Give a module a share of the samples, and gather its outputs."""
        module.register_forward_pre_hook(lambda _, args: (_Exchange.apply(args[0], group, True), *args[1:]))
        module.register_forward_hook(lambda _, args, output: _Exchange.apply(output, group, False))


LANES = LaneDimension()
