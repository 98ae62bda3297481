"""Calling the model of a stage: its share of a batch, its loss, its outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.model.batch import (
    LossFn,
    batch_size,
    call_model,
    loss_of,
    map_tensors,
    slice_batch,
    with_share_of_items,
)
from galvatron_lite.parallelism.precision import compute_context
from galvatron_lite.parallelism.rng.modules import Draws
from galvatron_lite.parallelism.sharded.tensor import to_local
from galvatron_lite.parallelism.spatial.apply import leaving
from galvatron_lite.parallelism.vocabulary.logits import whole_logits
from galvatron_lite.runtime.draws import drawing
from galvatron_lite.runtime.layout import WHOLE, AxisSplit
from galvatron_lite.runtime.loss_weight import LossWeight, ShareScale, share_scales, weighted
from galvatron_lite.runtime.setup import StageRuntime
from galvatron_lite.runtime.synced_buffers import SyncedBuffers


@dataclass(frozen=True, slots=True)
class Calls:
    """How models of stages are called."""

    compute: torch.dtype | None  # dtype of compute; None: that of the parameters
    device: torch.device  # of this rank
    loss_fn: LossFn | None  # ``loss_fn(output, batch)``; see ``model.batch.loss_of``
    draws: Draws | None = None  # decides random numbers; None: each rank draws for itself
    # how much the loss of some samples counts; None: as much as that of as many others
    weight: LossWeight | None = None
    reduction: str = "mean"  # what the loss is over samples, ``mean`` or ``sum``
    scales: dict[int, ShareScale] = field(default_factory=dict)  # on the loss of each part, by its identity
    buffers: SyncedBuffers = field(default_factory=lambda: SyncedBuffers({}))  # that forward passes update

    def parts(self, runtime: StageRuntime, batch: Any, rows: int) -> list[Any]:
        """This rank's samples of every micro-batch of so many rows, in the layout of a stage's glue code."""
        traffic, place = runtime.traffic, runtime.meshes.index_in_stage
        ((top, bottom),) = traffic.glue.samples((rows,)).box(place, (rows,)).ranges
        samples = batch_size(batch)
        starts, shares = range(0, samples, rows), traffic.glue.batch
        scales: list[ShareScale] = []
        if runtime.is_last:
            scales = share_scales(self.weight, self.reduction, batch, shares * len(starts))
        batch = with_share_of_items(batch, (bottom - top) / samples)
        parts = [slice_batch(batch, start + top, start + bottom) for start in starts]
        made = [traffic.cut_batch(part, self.device) for part in parts]
        for part, start in zip(made, starts, strict=True):
            if self.draws is not None:
                self.draws.note(part, start)
        if runtime.is_last:
            self.scales.clear()
            self.scales.update(zip(map(id, made), scales[top // (bottom - top) :: shares], strict=True))
        return made

    def loss(self, runtime: StageRuntime, part: Any, rows: int) -> Tensor:
        """The loss of this rank's samples, times their weight; zero where the stage is not the last."""
        with self._running(runtime, part, rows), self.buffers.updating(runtime):
            scale = self.scales.get(id(part), ShareScale())
            with scale.inside():
                output = call_model(runtime.model, part)
                if not runtime.is_last:
                    return torch.zeros((), device=self.device)
                loss = leaving(loss_of(output, part, self.loss_fn), runtime.traffic.border.lines)
            return weighted(loss, scale.total)

    def outputs(self, runtime: StageRuntime, part: Any, rows: int) -> tuple[Any, tuple[bool, ...]]:
        """The model's own outputs, whole on every rank of the stage, and of each tensor whether it holds the samples.

        Others (a loss) are means over the ranks' shares of the samples, scalars with their weights.
        """
        sampled: list[bool] = []
        scale = self.scales.get(id(part), ShareScale())

        def gathered(tensor: Tensor) -> Tensor:
            sampled.append(runtime.traffic.piece(tensor) is not None)
            return _gathered(runtime, tensor, scale.total)

        with self._running(runtime, part, rows), scale.inside():
            found = call_model(runtime.model, part)
            return (map_tensors(found, gathered) if runtime.is_last else None), tuple(sampled)

    @contextmanager
    def _running(self, runtime: StageRuntime, part: Any, rows: int) -> Iterator[None]:
        runtime.traffic.begin(rows)
        try:
            inside = drawing(self.draws, runtime.stage, runtime.meshes, part, rows)
            with compute_context(self.compute, self.device), inside:
                yield
        finally:
            runtime.traffic.end()


def _gathered(runtime: StageRuntime, tensor: Tensor, factor: Tensor | None) -> Tensor:
    traffic, group = runtime.traffic, runtime.glue_groups.batch
    piece = traffic.piece(tensor)
    if piece is not None:
        whole = AxisSplit(piece.split.devices, (WHOLE,) * len(piece.shape))
        return traffic.mover(piece.tensor, piece.split, whole, piece.shape)
    plain = to_local(whole_logits(tensor))
    if plain.is_floating_point() and plain.numel() == 1:
        plain = weighted(plain, factor)
    if group is None or not plain.is_floating_point():
        return plain
    total = plain.clone()
    dist.all_reduce(total, group=group)
    return total / traffic.glue.batch
