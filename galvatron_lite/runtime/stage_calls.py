"""Calling the model of a stage: its share of a batch, its loss, its outputs."""

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


def draws_of(
    randomness: str, model: nn.Module, plan: Plan, layers: Sequence[Layer], batch: Any, seed: int, *, compiles: bool
) -> Draws | None:
    """The random numbers of a model that is not split yet; None where each rank draws for itself."""
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
    holder: nn.Module
    name: str
    before: Tensor
    change: Tensor
    rule: str
    group: dist.ProcessGroup | None

    @property
    def tensor(self) -> Tensor:
        """As it is now: a forward pass may put another tensor in its place."""
        return self.holder.get_buffer(self.name)


class SyncedBuffers:
    """Buffers that a forward pass updates from its samples (averages, counters), the same on every rank after a step.

    Each pass of a step starts from the buffer before the step; the step's update is the mean, or the sum, of those of
    all micro-batches and ranks, as ``SyncBatchNorm`` has it for running statistics.

    Args:
        rules: ``mean`` or ``sum`` by the name of a buffer in the full model (found by ``verify.trial``).
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
        for name, rule in self._rules.items():
            holders = [one for one in runtime.stage if any(at(name, path) for path in one.layer.modules)]
            loose = runtime.stage[:1] if runtime.pipeline is None else ()
            for placed in holders or loose:
                group = runtime.meshes.groups(placed.strategy).batch
                before = runtime.model.get_buffer(name).detach().clone()
                change = torch.zeros_like(before, dtype=torch.float64)
                yield _Buffer(runtime.model, name, before, change, rule, group)

    @contextmanager
    def updating(self, runtime: StageRuntime) -> Iterator[None]:
        """While the forward pass of a micro-batch runs."""
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
        """The passes are done: every rank gets the same values. All ranks call it."""
        for one in (buffer for buffers in self._buffers.values() for buffer in buffers):
            shares = self._passes
            if one.group is not None:
                dist.all_reduce(one.change, group=one.group)
                shares *= one.group.size()
            change = one.change / shares if one.rule == "mean" else one.change
            value = one.before.double() + change
            one.tensor.copy_(value if one.tensor.is_floating_point() else value.round())
        self._buffers = {}


@dataclass(slots=True)
class Calls:
    """How models of stages are called."""

    compute: torch.dtype | None  # dtype of compute; None: that of the parameters
    device: torch.device  # of this rank
    loss_fn: LossFn | None  # ``loss_fn(output, batch)``; see ``model.batch.loss_of``
    draws: Draws | None = None  # decides random numbers; None: each rank draws for itself
    weight: LossWeight | None = None  # how much the loss of some samples counts; None: that of all samples alike
    reduction: str = "mean"  # of the loss over samples, ``mean`` or ``sum``
    scales: dict[int, ShareScale] = field(default_factory=dict)  # on the loss of each part, by its identity
    buffers: SyncedBuffers = field(default_factory=lambda: SyncedBuffers({}))  # that forward passes update
    rows: int = 0  # of a micro-batch, over all ranks

    def parts(self, runtime: StageRuntime, batch: Any) -> list[Any]:
        """This rank's samples of every micro-batch, in the layout of a stage's glue code."""
        traffic, rows, place = runtime.traffic, self.rows, runtime.meshes.index_in_stage
        ((top, bottom),) = traffic.glue.samples((rows,)).box(place, (rows,)).ranges
        samples = batch_size(batch)
        check_entries(runtime.model, batch, self.loss_fn)
        starts, shares = range(0, samples, rows), traffic.glue.batch
        scales: list[ShareScale] = []
        if runtime.is_last:
            scales = share_scales(self.weight, self.reduction, batch, shares * len(starts))
        batch = with_share_of_items(batch, (bottom - top) / samples)
        parts = [
            traffic.cut_batch(slice_batch(batch, start + top, start + bottom), self.device) for start in starts
        ]  # fmt: skip
        if self.draws is not None:
            for part, start in zip(parts, starts, strict=True):
                self.draws.note(part, start)
        if runtime.is_last:
            self.scales.clear()
            self.scales.update(zip(map(id, parts), scales[top // (bottom - top) :: shares], strict=True))
        return parts

    def loss(self, runtime: StageRuntime, part: Any) -> Tensor:
        """The loss of this rank's samples, times their weight; zero where the stage is not the last."""
        with self._running(runtime, part), self.buffers.updating(runtime):
            scale = self.scales.get(id(part), ShareScale())
            with scale.inside():
                output = call_model(runtime.model, part)
                if not runtime.is_last:
                    return torch.zeros((), device=self.device)
                loss = leaving(loss_of(output, part, self.loss_fn), runtime.traffic.border.lines)
            return weighted(loss, scale.total)

    def outputs(self, runtime: StageRuntime, part: Any) -> tuple[Any, tuple[bool, ...]]:
        """The model's own outputs, complete on every rank of the stage, and of each tensor whether it holds the
        samples. Others (a loss) are means over the ranks' shares of the samples, scalars with their weights.
        """
        sampled: list[bool] = []
        scale = self.scales.get(id(part), ShareScale())

        def gathered(tensor: Tensor) -> Tensor:
            sampled.append(runtime.traffic.piece(tensor) is not None)
            return _gathered(runtime, tensor, scale.total)

        with self._running(runtime, part), scale.inside():
            output = call_model(runtime.model, part)
            return (map_tensors(output, gathered) if runtime.is_last else None), tuple(sampled)

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
    traffic, group = runtime.traffic, runtime.glue_groups.batch
    piece = traffic.piece(tensor)
    if piece is not None:
        full = AxisSplit(piece.split.devices, (WHOLE,) * len(piece.shape))
        return traffic.mover(piece.tensor, piece.split, full, piece.shape)
    plain = to_local(full_logits(tensor))
    if plain.is_floating_point() and plain.numel() == 1:
        plain = weighted(plain, factor)
    if group is None or not plain.is_floating_point():
        return plain
    total = plain.clone()
    dist.all_reduce(total, group=group)
    return total / traffic.glue.batch
