"""What one layer costs one device under one strategy: seconds of a micro-batch and of a step, and bytes of memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from operator import and_
from typing import Any, TypeVar

import numpy as np

from galvatron_lite.arrays import BoolArray, Flag, FloatArray, IntArray, Real, Whole, largest, where
from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.cost.communication import Links, exposed_by
from galvatron_lite.cost.forward_only import passes_with_moves, without_gradients
from galvatron_lite.cost.layer_memory import layer_bytes
from galvatron_lite.cost.layout import exchange_sizes, received_shares
from galvatron_lite.cost.points import (
    Curves,
    LayerFigures,
    PointKey,
    code_of,
    figures_at,
    index_points,
    key_of,
    points_of,
)
from galvatron_lite.model.graph import LayerKind
from galvatron_lite.parallelism.base import Communication, DimensionContext, LayerWork, Moment
from galvatron_lite.parallelism.layout import Layout, layout_of
from galvatron_lite.parallelism.offload.cost import HostItem, host_traffic
from galvatron_lite.parallelism.pipeline.cost import weight_products, weight_seconds
from galvatron_lite.parallelism.ranks import Either, rank_group
from galvatron_lite.parallelism.registry import dimensions, work_on
from galvatron_lite.parallelism.spatial.cost import samples_of
from galvatron_lite.parallelism.strategy import INSIDE, Strategies, Strategy
from galvatron_lite.profiler.schema import LayerPoint, Profile
from galvatron_lite.units import ITEM_BYTES, activation_bytes

T = TypeVar("T")
LAYOUT = "layout"
"""Cause of communication between layers of different layouts."""


@dataclass(frozen=True, slots=True)
class ParameterSharing:
    """What a layer shares with other layers in terms of parameters, seen from one stage."""

    # whether it shares parameters with another layer of the stage: ZeRO gathers those of both at once, and they and
    # their full gradients stay until the backward of the first of these layers
    grouped: bool = False
    copied: int = 0  # items of its copy of parameters of a layer in another stage
    frozen: int = 0  # items of that copy without gradient
    exchanged: int = 0  # items whose gradients are summed with the other stage once a step


ALONE = ParameterSharing()
"""A layer that shares no parameters."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer on one device; of many strategies (``LayerPricer.price_many``) all figures are arrays (n,).

    Attributes:
        forward: seconds of compute of a micro-batch in forward.
        backward: in backward, without ``recompute``.
        recompute: in backward, to compute activations again.
        forward_exposed: seconds of communication of a micro-batch in forward that compute does not hide.
        backward_exposed: the same in backward.
        host: seconds of fixed host work of a micro-batch, half in forward, half in backward.
        step_exposed: seconds of communication once a step that compute does not hide.
        update: seconds of the optimizer.
        step_host: seconds of fixed host work once a step.
        parameters: bytes of parameters at rest, and of buffers.
        gradients: bytes of gradients that stay allocated.
        formed_gradients: bytes of gradients that exist from the layer's first backward of a step to the update.
        states: bytes of optimizer states.
        kept: bytes of activations saved from forward to backward of a micro-batch; 0 if they wait in host memory.
        gathered: bytes of parameters gathered from the layer's forward to the end of its backward.
        transient_parameters: bytes of parameters gathered only while the layer computes.
        gather_buffer: bytes of the buffer that a gather fills.
        full_gradients: bytes of full gradients that backward makes before it reduces them.
        reduce_buffer: bytes of the buffer that is reduced; it lives on in the backward of the layer before.
        working: bytes in backward, see ``LayerPoint``.
        forward_working: bytes in forward, see ``LayerPoint``.
        optimizer_working: temporary bytes of the optimizer.
        passing_gradients: bytes of gradients from the layer's backward to the end of the backward pass.
        accumulated: bytes by which gradients are larger in a step of several micro-batches, if they stay full until
            the last one.
        offloaded: bytes of activations that wait in host memory. They are on the device while the layer computes (as
            part of ``working`` and ``forward_working``), and while they are copied during the next layer in either
            pass.
        weight_copies: bytes of copies of weights in the precision of compute that all passes of a step share.
        frozen_copies: the part of them without gradient.
        new_gradient: bytes of the largest gradient of one weight, beside the buffer that it is added to.
        cast_gradient: the same, with the gradient in the precision of compute that it is cast from.
        bucket_copy: bytes of the copy of a bucket of gradients that is reduced (ZeRO-1), until the backward of the
            layer before ends.
        weight_working: bytes in backward while the gradient of a weight is made, without ``new_gradient``.
        weight: the part of ``backward`` that a zero-bubble schedule leaves to a pass of its own.
        split_host: seconds of host work of a micro-batch that such a schedule adds.
        valid: whether the profile has points for the strategy; if not, the other figures mean nothing.
    """

    forward: float
    backward: float
    recompute: float
    forward_exposed: float
    backward_exposed: float
    host: float
    step_exposed: float
    update: float
    step_host: float
    parameters: int
    gradients: int
    formed_gradients: int
    states: int
    kept: int
    gathered: int
    transient_parameters: int
    gather_buffer: int
    full_gradients: int
    reduce_buffer: int
    working: int
    forward_working: int
    optimizer_working: int
    passing_gradients: int = 0
    accumulated: int = 0
    offloaded: int = 0
    weight_copies: int = 0
    frozen_copies: int = 0
    new_gradient: int = 0
    cast_gradient: int = 0
    bucket_copy: int = 0
    weight_working: int = 0
    weight: float = 0.0
    split_host: float = 0.0
    valid: bool | BoolArray = True

    @property
    def forward_seconds(self) -> float:
        """Seconds of the forward of a micro-batch."""
        return self.forward + self.forward_exposed + self.host / 2

    @property
    def backward_seconds(self) -> float:
        """Seconds of the backward of a micro-batch."""
        return self.backward + self.recompute + self.backward_exposed + self.host / 2

    @property
    def step_seconds(self) -> float:
        """Seconds once a step."""
        return self.step_exposed + self.update + self.step_host

    def with_split_backward(self) -> LayerCost:
        """The cost under a schedule that computes gradients of weights in separate passes."""
        return replace(self, host=self.host + self.split_host)


_FIGURES = tuple(item.name for item in fields(LayerCost) if item.name != "valid")


def _layer_costs(figures: dict[str, Any], valid: BoolArray) -> LayerCost:
    """The cost of many strategies; each figure is an array, or a number for all of them."""
    arrays: dict[str, Any] = {
        name: figure + np.zeros(len(valid), dtype=np.asarray(figure).dtype) for name, figure in figures.items()
    }
    return LayerCost(**arrays, valid=valid)


WorkKey = tuple[str, ParameterSharing, Strategy, int]
"""Kind of layer, sharing, strategy, samples of a micro-batch."""


@dataclass(slots=True)
class LayerPricer:
    """Prices layers from one profile, and remembers the results."""

    profile: Profile
    common: Links | None = None  # prices communication between devices of different types; None: ``links``
    # works, sizes, points: also valid for profiles that differ in seconds of compute and of links only
    works: dict[WorkKey, LayerWork] = field(default_factory=dict)
    sizes: dict[WorkKey, dict[str, Whole]] = field(default_factory=dict)
    points: dict[PointKey, tuple[LayerPoint, ...]] = field(default_factory=dict)  # empty: those of the profile
    compute: float = 1.0  # factor on the seconds of these points
    links: Links = field(init=False)
    _gradients: int = field(init=False)  # bytes of the gradients of the model
    _host: dict[str, float] = field(init=False)
    _by_kind: dict[str, dict[PointKey, tuple[LayerPoint, ...]]] = field(default_factory=dict)
    _curves: dict[str, Curves] = field(default_factory=dict)
    _costs: dict[tuple[str, ParameterSharing, Strategy, int, int], LayerCost | None] = field(default_factory=dict)
    _moves: dict[tuple[int, Layout, Layout], float] = field(default_factory=dict)
    _exchanges: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], tuple[RankGroup, FloatArray, IntArray]] = field(
        default_factory=dict
    )
    _types: dict[int, LayerPricer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Index the profile."""
        self.links = Links(self.profile)
        self.points = self.points or index_points(self.profile.layers)
        self._gradients = self.profile.graph.trainable * ITEM_BYTES[self.profile.reduce_precision]
        overhead = self.profile.overhead
        self._host = {item.name: getattr(overhead, item.name) for item in fields(overhead)}

    @property
    def prices_splitting(self) -> bool:
        """Whether layers cost more under schedules that split backward."""
        return self._host["split_product"] > 0.0 or self._host["split_share"] > 0.0

    def of_group(self, stage_devices: int, group: int) -> LayerPricer:
        """Return the pricer for the type of devices of a pipeline group.

        It is this pricer, which has the slowest figures, if the cluster has one type or the group has several.
        """
        ranks = range(group * stage_devices, (group + 1) * stage_devices)
        device_type = self.profile.cluster.type_of(ranks)
        if device_type is None:
            return self
        if device_type not in self._types:
            self._types[device_type] = LayerPricer(self.profile.only(device_type), self.links, compute=self.compute)
        return self._types[device_type]

    def price(
        self, kind: str, strategy: Strategy, microbatch: int, stages: int, sharing: ParameterSharing = ALONE
    ) -> LayerCost | None:
        """Price a layer.

        Args:
            kind: key into the graph's kinds.
            strategy: for all devices of the stage.
            microbatch: samples of one micro-batch over the stage; divisible by ``strategy.batch_degree``.
            stages: of the pipeline.
            sharing: with other layers.

        Returns:
            None if the profile has no points for the strategy, if the bandwidth of the link to host memory that it
            needs is unknown, or if the layer has too few pixels for it.
        """
        key = (kind, sharing, strategy, microbatch, stages)
        if key not in self._costs:
            self._costs[key] = self._new_price(kind, strategy, microbatch, stages, sharing)
        return self._costs[key]

    def _new_price(
        self, kind: str, strategy: Strategy, microbatch: int, stages: int, sharing: ParameterSharing
    ) -> LayerCost | None:
        layer_kind = self.profile.graph.kinds[kind]
        points = points_of(self.points, key_of(kind, strategy)) if self._runs(layer_kind, strategy) else None
        if points is None:
            return None
        samples = samples_of(layer_kind, strategy, microbatch)
        figures = figures_at(points, samples).scaled(self.compute)
        keeping = strategy.split
        kept_points = points_of(self.points, key_of(kind, keeping))
        without = figures.backward
        if keeping != strategy and kept_points is not None and self._runs(layer_kind, keeping):
            without = figures_at(kept_points, samples).backward * self.compute
        return LayerCost(**self._priced(kind, strategy, microbatch, stages, sharing, figures, without))

    def price_many(
        self,
        kind: str,
        strategies: Sequence[Strategy] | Strategies,
        microbatch: int | IntArray,
        stages: int,
        sharing: ParameterSharing = ALONE,
    ) -> LayerCost:
        """Price a layer under n strategies at once: the same figures as those of ``price``, to the last bit.

        Args:
            kind: key into the graph's kinds.
            strategies: each for all devices of its stage; ``Strategies`` need no conversion.
            microbatch: samples of one micro-batch over the stage, or (n,) of them.
            stages: of the pipeline.
            sharing: with other layers.
        """
        many = strategies if isinstance(strategies, Strategies) else Strategies.of(strategies)
        layer_kind, curves = self.profile.graph.kinds[kind], self._curves_of(kind)
        if not len(curves.codes) or not len(many):
            return _layer_costs(dict.fromkeys(_FIGURES, 0), np.zeros(len(many), dtype=np.bool_))
        samples = samples_of(layer_kind, many, microbatch)
        figures, valid = curves.at(code_of(many), samples)
        figures = figures.scaled(self.compute)
        without, has_points = curves.backward(code_of(many, **INSIDE), samples)
        without = np.where(has_points, without * self.compute, figures.backward)
        valid = valid & self._runs(layer_kind, many)
        return _layer_costs(self._priced(kind, many, microbatch, stages, sharing, figures, without), valid)

    def _curves_of(self, kind: str) -> Curves:
        if kind not in self._curves:
            if not self._by_kind:
                for key, points in self.points.items():
                    self._by_kind.setdefault(key[0], {})[key] = points
            self._curves[kind] = Curves.of(self._by_kind.get(kind, {}))
        return self._curves[kind]

    def covers(self, kind: str, strategy: Strategy) -> bool:
        """Whether the profile has points for a kind of layer under a strategy."""
        return points_of(self.points, key_of(kind, strategy)) is not None

    def worked(self, strategy: Strategy) -> Strategy:
        """Reduce a strategy to what a profile must have points for."""
        needed = [name for dimension in dimensions() if not dimension.stands_in for name in dimension.runs]
        return replace(Strategy(), **{name: getattr(strategy, name) for name in needed})

    def _runs(self, kind: LayerKind, strategy: Either) -> Flag:
        """Whether the device can run a kind of layer under a strategy."""
        device = self.profile.cluster.device
        return reduce(and_, (dimension.runs_on(device, kind, strategy) for dimension in dimensions()))

    def redistribution(self, output_bytes: int, microbatch: int, left: Strategy, right: Strategy) -> float:
        """Return the seconds to bring the tensor between two layers from one layout to the other, in one direction."""
        key = (output_bytes * microbatch, layout_of(left), layout_of(right))
        if key not in self._moves:
            self._moves[key] = float(self.redistributions(output_bytes, microbatch, key[1:2], key[2:])[0, 0])
        return self._moves[key]

    def redistributions(
        self, output_bytes: int, microbatch: int, left: Sequence[Layout], right: Sequence[Layout]
    ) -> FloatArray:
        """Return the seconds (A, B) to bring a tensor from each of A layouts to each of B, in one direction.

        Runs of consecutive devices (``exchange_sizes``) exchange what they lack in one all-to-all. The result is the
        mean of both directions (``received_shares``), 0 for equal layouts.

        Args:
            output_bytes: of the tensor, a sample.
            microbatch: samples of one micro-batch over the stage.
            left: layouts as ``layout_of`` returns them.
            right: layouts on as many devices.
        """
        if not left or not right:
            return np.zeros((len(left), len(right)))
        ranks, shares, index = self._exchanges_of(tuple(left), tuple(right))
        sent = output_bytes * microbatch * shares * ranks.size / largest(ranks.size - 1, 1)
        exchange = Communication(Collective.ALL_TO_ALL, sent, ranks, Moment.FORWARD, overlaps=False, cause=LAYOUT)
        seconds = np.asarray(self.links.timed([exchange])[0], dtype=np.float64)[index]
        return seconds * passes_with_moves(self.profile)

    def _exchanges_of(
        self, left: tuple[Layout, ...], right: tuple[Layout, ...]
    ) -> tuple[RankGroup, FloatArray, IntArray]:
        """The n distinct exchanges between layouts: their groups, the share of the tensor that a device receives, and
        (A, B) which exchange each pair of layouts needs."""
        if (left, right) not in self._exchanges:
            pairs = np.array(left, dtype=np.int64)[:, None], np.array(right, dtype=np.int64)[None, :]
            exchanges = np.stack((exchange_sizes(*pairs), received_shares(*pairs)), axis=-1)
            distinct, inverse = np.unique(exchanges.reshape(-1, 2), axis=0, return_inverse=True)
            sizes = distinct[:, 0].astype(np.int64)
            ranks = rank_group(sizes, np.ones_like(sizes), left[0].devices // sizes)
            index: IntArray = inverse.reshape(exchanges.shape[:-1])
            self._exchanges[left, right] = (ranks, distinct[:, 1].astype(np.float64), index)
        return self._exchanges[left, right]

    def _priced(
        self,
        name: str,
        strategy: Either,
        microbatch: Whole,
        stages: int,
        sharing: ParameterSharing,
        figures: LayerFigures,
        without_recompute: Real,
    ) -> dict[str, Any]:
        """The fields of ``LayerCost``, of one strategy or many; ``without_recompute``: seconds of such a backward."""
        profile, optimizer = self.profile, self.profile.optimizer
        kind = profile.graph.kinds[name].with_copy(sharing.copied, sharing.frozen)
        key = (name, sharing, strategy, microbatch)
        work = _remembered(self.works, key, lambda: self.work(kind, strategy, microbatch))
        figures = figures.with_edges(work.edge_bytes, *work.edge_working)
        # measured with noise, a backward with recomputation may be quicker than one without
        backward = largest(figures.backward, without_recompute)
        figures = replace(figures, backward=backward, kept=0 if profile.forward_only else figures.kept)
        recompute = backward - without_recompute
        backward = backward - recompute
        timed = list(zip(work.communications, self.links.timed(work.communications), strict=True))
        exposed = exposed_by(timed, figures, profile.hidden, profile.overlap)
        exchange = 0.0 if profile.forward_only else self._exchange(sharing.exchanged, strategy, stages)
        width = ITEM_BYTES[profile.parameter_precision]
        item = HostItem(ITEM_BYTES[profile.reduce_precision], width, optimizer.state_bytes)
        host = host_traffic(profile.cluster.device, work, (figures.forward, figures.backward), figures.kept, item)
        weight = weight_seconds(figures.forward, backward)
        overhead = profile.overhead
        split_host = overhead.split_product * weight_products(kind) + overhead.split_share * weight
        reduces = strategy.parameter_shards > 1  # ZeRO-2 and 3 reduce gradients in backward and leave none for later
        sizes = _remembered(
            self.sizes,
            key,
            lambda: layer_bytes(profile, kind, work, figures, strategy, self._gradients, grouped=sharing.grouped),
        )
        return {
            "forward": figures.forward,
            "backward": backward,
            "recompute": recompute,
            "forward_exposed": exposed.forward + host.forward,
            "backward_exposed": exposed.backward + host.backward,
            "host": work.microbatch_overhead,
            "step_exposed": exposed.step + exchange + host.step,
            "update": self._update(kind, work) + host.update,
            "step_host": work.step_overhead,
            "weight": where(reduces, 0.0, weight),
            "split_host": where(reduces, 0.0, split_host),
            **sizes,
        }

    def _update(self, kind: LayerKind, work: LayerWork) -> Real:
        """Seconds of the optimizer on the device, in which masters are also read, and cast for the gather."""
        profile, optimizer = self.profile, self.profile.optimizer
        tensors = sum(operator.count for operator in kind.operators if operator.weight_bytes and not operator.frozen)
        items = work.state_items - work.host_items
        masters = work.master_items * (ITEM_BYTES[profile.parameter_precision] + profile.copied_bytes)
        seconds = items * optimizer.seconds_per_item + tensors * optimizer.seconds_per_tensor
        return seconds + masters / profile.cluster.device.memory_bandwidth

    def work(self, kind: LayerKind, strategy: Either, microbatch: Whole) -> LayerWork:
        """Return what one device computes and holds for a layer; ``microbatch``: samples over the stage."""
        profile = self.profile
        context = DimensionContext(
            devices=strategy.devices,
            node_devices=profile.cluster.levels[0].size,
            activation_item_bytes=activation_bytes(profile.graph.precision),
            gather_item_bytes=ITEM_BYTES[profile.gather_precision],
            parameter_item_bytes=ITEM_BYTES[profile.parameter_precision],
            reduce_item_bytes=ITEM_BYTES[profile.reduce_precision],
            microbatches=1,
            host=self._host,
            accumulates=profile.accumulates,
            masters=profile.copied_bytes > 0,
            shard_share=profile.shard_share,
            pictures=profile.pictures,
        )
        work = work_on(kind, strategy, microbatch, context)
        return without_gradients(work) if profile.forward_only else work

    def _exchange(self, items: int, strategy: Either, stages: int) -> Real:
        """Seconds to sum the gradients of shared parameters with the copy of the other stage, shard by shard.

        Under ZeRO-1 gradients are full when they are summed (Megatron-LM's ``finalize_model_grads``). In a cluster of
        several types of devices the slower links count.
        """
        if items == 0 or stages == 1:
            return 0.0
        devices = strategy.devices
        size = items / (strategy.weight_slices * strategy.parameter_shards) * ITEM_BYTES[self.profile.reduce_precision]
        group = RankGroup(2, devices * (stages - 1), devices)
        links = self.common or self.links
        return links.timed([Communication(Collective.ALL_REDUCE, size, group, Moment.STEP, overlaps=False)])[0]


def _remembered(results: dict[Any, T], key: tuple[Hashable, ...], compute: Callable[[], T]) -> T:
    """Compute a result once for each single strategy; those of many strategies at once are not remembered."""
    if any(isinstance(part, Strategies) for part in key):
        return compute()
    if key not in results:
        results[key] = compute()
    return results[key]
