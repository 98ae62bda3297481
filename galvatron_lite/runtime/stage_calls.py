"""Calls of the models of stages: their share of a batch, their loss, their outputs, and the buffers they update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import (
    LossFn,
    batch_size,
    call_model,
    check_entries,
    loss_of,
    map_tensors,
    slice_batch,
    with_share_of_items,
)
from galvatron_lite.model.graph import Layer
from galvatron_lite.model.trace.flow import at
from galvatron_lite.parallelism.precision import compute_context
from galvatron_lite.parallelism.rng.modules import Draws, find_sites
from galvatron_lite.parallelism.sharded.tensor import to_local
from galvatron_lite.parallelism.spatial.apply import leaving
from galvatron_lite.parallelism.vocabulary.logits import full_logits
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.activations.layout import WHOLE, AxisSplit
from galvatron_lite.runtime.assignment import glue_of
from galvatron_lite.runtime.loss.weights import LossWeight, ShareScale, share_scales, weighted
from galvatron_lite.runtime.sharding import sample_slice
from galvatron_lite.runtime.stages import StageRuntime

OWN, SAME = "own", "same"
"""Values of ``randomness``: each rank draws its own numbers, or all plans draw the same."""


def draws_of(
    randomness: str, model: nn.Module, plan: Plan, layers: Sequence[Layer], batch: Any, seed: int, *, compiles: bool
) -> Draws | None:
    """What draws the random numbers of a model that is not split yet; None if each rank draws its own.

    Raises:
        InputError: an unknown value of ``randomness``, or blocks or branches that cannot draw the same numbers.
    """
    if randomness not in (OWN, SAME):
        raise InputError("randomness", randomness, f"Give '{OWN}' or '{SAME}'.")
    if randomness == OWN:
        return None
    if compiles or plan.branches:
        what = "blocks are compiled" if compiles else "branches have ranks of their own"
        raise InputError("randomness", randomness, f"Take '{OWN}': {what}.")
    return Draws(seed, find_sites(model, layers, batch), batch)


@dataclass(slots=True)
class _Buffer:
    """A buffer during a step."""

    module: nn.Module
    name: str  # in the module
    before: Tensor  # value before the step
    change: Tensor  # sum of the changes by the passes of this rank
    rule: str
    group: dist.ProcessGroup | None  # ranks with other samples

    @property
    def tensor(self) -> Tensor:
        """The present tensor, which a forward pass may have replaced."""
        return self.module.get_buffer(self.name)


class SyncedBuffers:
    """Buffers that a forward pass updates from its samples (averages, counters), the same on every rank after a step.

    Each pass of a step starts from the buffer before the step; the step's update is the mean, or the sum, of those of
    all micro-batches and ranks, as ``SyncBatchNorm`` does for running statistics.

    Args:
        rules: ``mean`` or ``sum`` by the name of a buffer in the full model (determined by ``verify.trial``).
    """

    def __init__(self, rules: Mapping[str, str]) -> None:
        self._rules, self._passes = rules, 1
        self._buffers: dict[int, list[_Buffer]] = {}

    def begin(self, runtimes: Sequence[StageRuntime], passes: int) -> None:
        """Begin a step of so many micro-batches."""
        self._passes = passes
        self._buffers = {id(runtime): list(self._buffers_of(runtime)) for runtime in runtimes} if self._rules else {}

    def _buffers_of(self, runtime: StageRuntime) -> Iterator[_Buffer]:
        """The buffers of the stage's layers; buffers of no layer count with the first layer of a single stage."""
        for name, rule in self._rules.items():
            holders = [placed for placed in runtime.stage if any(at(name, path) for path in placed.layer.modules)]
            default = runtime.stage[:1] if runtime.pipeline is None else ()
            for placed in holders or default:
                group = runtime.meshes.groups(placed.strategy).batch
                before = runtime.model.get_buffer(name).detach().clone()
                change = torch.zeros_like(before, dtype=torch.float64)
                yield _Buffer(runtime.model, name, before, change, rule, group)

    @contextmanager
    def updating(self, runtime: StageRuntime) -> Iterator[None]:
        """Run the forward pass of a micro-batch inside."""
        buffers = self._buffers.get(id(runtime), ())
        for buffer in buffers:
            buffer.tensor.copy_(buffer.before)
        try:
            yield
        finally:  # a stage that is not the last one ends its forward by an exception
            for buffer in buffers:
                buffer.change += buffer.tensor.double() - buffer.before.double()

    @torch.no_grad()
    def finish(self) -> None:
        """Set the buffers of all ranks to the same values after the passes. All ranks call it."""
        for buffer in (buffer for buffers in self._buffers.values() for buffer in buffers):
            shares = self._passes
            if buffer.group is not None:
                dist.all_reduce(buffer.change, group=buffer.group)
                shares *= buffer.group.size()
            change = buffer.change / shares if buffer.rule == "mean" else buffer.change
            value = buffer.before.double() + change
            buffer.tensor.copy_(value if buffer.tensor.is_floating_point() else value.round())
        self._buffers = {}


@dataclass(slots=True)
class Calls:
    """Calls the models of stages."""

    compute: torch.dtype | None  # dtype of compute; None: that of the parameters
    device: torch.device  # of this rank
    loss_fn: LossFn | None  # ``loss_fn(output, batch)``; see ``model.batch.loss_of``
    draws: Draws | None = None  # decides random numbers; None: each rank draws its own
    weight: LossWeight | None = None  # how much the loss of some samples counts; None: equal
    reduction: str = "mean"  # of the loss over samples, ``mean`` or ``sum``
    scales: dict[int, ShareScale] = field(default_factory=dict)  # of the loss of each part, by its identity
    buffers: SyncedBuffers = field(default_factory=lambda: SyncedBuffers({}))  # that forward passes update
    rows: int = 0  # of a micro-batch, over all ranks

    def parts(self, runtime: StageRuntime, batch: Any) -> list[Any]:
        """This rank's samples of each micro-batch, in the layout of a stage's glue code."""
        traffic, rows, place = runtime.traffic, self.rows, runtime.meshes.index_in_stage
        ((top, bottom),) = traffic.glue.samples((rows,)).box(place, (rows,)).ranges
        samples, shares = batch_size(batch), traffic.glue.batch
        check_entries(runtime.model, batch, self.loss_fn)
        starts = range(0, samples, rows)
        scales: list[ShareScale] = []
        if runtime.is_last:
            scales = share_scales(self.weight, self.reduction, batch, shares * len(starts))
        batch = with_share_of_items(batch, (bottom - top) / samples)
        local_rows = (slice_batch(batch, start + top, start + bottom) for start in starts)
        parts = [traffic.cut_batch(local, self.device) for local in local_rows]
        if self.draws is not None:
            for part, start in zip(parts, starts, strict=True):
                self.draws.note(part, start)
        if runtime.is_last:
            self.scales.clear()
            self.scales.update(zip(map(id, parts), scales[top // (bottom - top) :: shares], strict=True))
        return parts

    def loss(self, runtime: StageRuntime, part: Any) -> Tensor:
        """The weighted loss of this rank's samples; zero if the stage is not the last."""
        with self._running(runtime, part), self.buffers.updating(runtime):
            scale = self.scales.get(id(part), ShareScale())
            with scale.inside():
                output = call_model(runtime.model, part)
                if not runtime.is_last:
                    return torch.zeros((), device=self.device)
                loss = leaving(loss_of(output, part, self.loss_fn), runtime.traffic.border.lines)
            return weighted(loss, scale.total)

    def outputs(self, runtime: StageRuntime, part: Any) -> tuple[Any, tuple[bool, ...]]:
        """The model's own outputs, complete on every rank of the stage, and whether each tensor contains the samples.

        Tensors without samples (a loss) are means over the ranks' shares of the samples; scalars are weighted means.
        """
        contain_samples: list[bool] = []
        scale = self.scales.get(id(part), ShareScale())

        def gather(tensor: Tensor) -> Tensor:
            contain_samples.append(runtime.traffic.piece(tensor) is not None)
            return _gathered(runtime, tensor, scale.total)

        with self._running(runtime, part), scale.inside():
            output = call_model(runtime.model, part)
            return (map_tensors(output, gather) if runtime.is_last else None), tuple(contain_samples)

    @contextmanager
    def _running(self, runtime: StageRuntime, part: Any) -> Iterator[None]:
        runtime.traffic.begin(self.rows)
        try:
            with compute_context(self.compute, self.device):
                if self.draws is None:
                    yield
                else:
                    self.draws.begin(part, self.rows)
                    with self.draws.inside(sample_slice(glue_of(runtime.stage), runtime.meshes)):
                        yield
        finally:
            runtime.traffic.end()


def _gathered(runtime: StageRuntime, tensor: Tensor, factor: Tensor | None) -> Tensor:
    traffic, group = runtime.traffic, runtime.samples_group
    piece = traffic.piece(tensor)
    if piece is not None:
        full = AxisSplit(piece.split.devices, (WHOLE,) * len(piece.shape))
        return traffic.mover(piece.tensor, piece.split, full, piece.shape)
    local = to_local(full_logits(tensor))
    if local.is_floating_point() and local.numel() == 1:
        local = weighted(local, factor)
    if group is None or not local.is_floating_point():
        return local
    total = local.clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)
