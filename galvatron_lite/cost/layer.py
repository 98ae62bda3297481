"""What one layer costs one device under one strategy: seconds a micro-batch and a step, bytes at each moment.

Communication that compute may hide runs beside it, the rest before or after it; ``cost.communication`` has the
formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from operator import and_
from typing import Any

import numpy as np

from galvatron_lite.arrays import BoolArray, Flag, FloatArray, IntArray, Real, Whole, largest, least, up, where
from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.cost.communication import Links, exposed_by
from galvatron_lite.cost.forward_only import passes_with_moves, without_gradients
from galvatron_lite.cost.layout import exchanging, received
from galvatron_lite.cost.points import (
    Curves,
    LayerFigures,
    PointKey,
    code_of,
    copied_bytes,
    figures_at,
    index_points,
    key_of,
    new_gradient_bytes,
    points_of,
)
from galvatron_lite.model.graph import LayerKind, Recompute
from galvatron_lite.parallelism.base import Communication, DimensionContext, LayerWork, Moment
from galvatron_lite.parallelism.data.cost import bucket_of
from galvatron_lite.parallelism.layout import Layout, layout_of
from galvatron_lite.parallelism.offload.cost import HostItem, host_traffic
from galvatron_lite.parallelism.pipeline.cost import weight_products, weight_seconds
from galvatron_lite.parallelism.ranks import Either, rank_group
from galvatron_lite.parallelism.registry import dimensions, work_on
from galvatron_lite.parallelism.spatial.cost import samples_of
from galvatron_lite.parallelism.strategy import INSIDE, Strategies, Strategy
from galvatron_lite.parallelism.zero.cost import sent_bucket
from galvatron_lite.profiler.schema import LayerPoint, Profile
from galvatron_lite.units import ITEM_BYTES, activation_bytes


@dataclass(frozen=True, slots=True)
class ParameterSharing:
    """What parameter sharing with another layer means for one layer in one stage."""

    # it shares parameters with another layer of the same stage, so that ZeRO gathers both at once: gathered ones stay
    # until the first one's backward, and so do their whole gradients
    grouped: bool = False
    copied: int = 0  # items of its own copy of parameters that a layer of another stage owns
    frozen: int = 0  # items of that copy that get no gradient
    exchanged: int = 0  # items whose gradients are summed with the other stage once a step


LAYOUT = "layout"
"""Cause of communication between layers whose tensors lie differently."""
ALONE = ParameterSharing()
"""A layer that shares no parameters."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer on one device; of many strategies (``LayerPricer.price_many``) all figures are arrays (n,)."""

    forward: float  # forward, backward, recompute: seconds of compute a micro-batch; ``backward`` without ``recompute``
    backward: float
    recompute: float
    # forward_exposed, backward_exposed: seconds of communication a micro-batch that compute does not hide
    forward_exposed: float
    backward_exposed: float
    host: float  # seconds of fixed host work a micro-batch, half in forward, half in backward
    step_exposed: float  # seconds of communication once a step that the last backward does not hide
    update: float  # seconds of the optimizer
    step_host: float  # seconds of fixed host work once a step
    parameters: int  # bytes at rest, buffers included
    gradients: int  # bytes of persistent gradient buffers
    formed_gradients: int  # bytes of gradients that exist from this layer's first backward of a step to the update
    states: int  # bytes of optimizer state
    kept: int  # bytes from forward to backward, one micro-batch; 0 where they wait in host memory
    gathered: int  # bytes of parameters gathered from this layer's forward until its backward ends
    gather: int  # bytes of parameters gathered only while this layer computes
    gathering: int  # bytes of one copy of the gathered parameters: the buffer the collective fills
    full_gradients: int  # bytes of whole gradients made in backward before they are reduced
    reducing: int  # bytes of the buffer that is reduced; it lives on during the next layer's backward
    working: int  # working, forward_working: bytes, see ``LayerPoint``
    forward_working: int
    updating: int  # temporary bytes of the optimizer for this layer's items
    # bytes of gradients that exist from this layer's backward to the end of the backward pass
    passing_gradients: int = 0
    # bytes by which gradients are larger where a step has several micro-batches and they stay whole until the last
    # one
    accumulated: int = 0
    # bytes kept in host memory: on the device while the layer itself computes (part of ``working`` and
    # ``forward_working``) and beside the layer after it, on their way in either pass
    returning: int = 0
    copies: int = 0  # bytes of weights in the precision of compute, held beside the parameters in all passes of a step
    frozen_copies: int = 0  # those among them that get no gradient
    # bytes of the largest gradient of one weight: made beside the buffer that gradients are summed in
    new_gradient: int = 0
    cast_gradient: int = 0  # the same with the one in the precision of compute that it is cast from
    # bytes of a copy of a bucket of gradients that is reduced meanwhile (ZeRO-1), until the next layer's backward ends
    bucket: int = 0
    at_weights: int = 0  # bytes while the gradient of a weight is made, without ``new_gradient``
    weight: float = 0.0  # the part of ``backward`` that a zero-bubble schedule leaves to a pass of its own
    splitting: float = 0.0  # seconds by which a micro-batch takes longer under such a schedule
    # whether the profile holds points for the strategy; the other figures mean nothing where it does not
    valid: bool | BoolArray = True

    @property
    def forward_seconds(self) -> float:
        """Seconds of one micro-batch's forward."""
        return self.forward + self.forward_exposed + self.host / 2

    @property
    def backward_seconds(self) -> float:
        """Seconds of one micro-batch's backward."""
        return self.backward + self.recompute + self.backward_exposed + self.host / 2

    @property
    def step_seconds(self) -> float:
        """Seconds once a step."""
        return self.step_exposed + self.update + self.step_host

    def with_split_backward(self) -> LayerCost:
        """The same under a schedule that leaves gradients of weights to passes of their own."""
        return replace(self, host=self.host + self.splitting)


_NAMES = tuple(item.name for item in fields(LayerCost) if item.name != "valid")


def _as_arrays(figures: Mapping[str, Any], valid: BoolArray) -> LayerCost:
    """Figures of n strategies, each an array or the same for all."""
    arrays: dict[str, Any] = {name: figure + np.zeros(len(valid), dtype=np.asarray(figure).dtype)
                              for name, figure in figures.items()}  # fmt: skip
    return LayerCost(**arrays, valid=valid)


@dataclass(slots=True)
class LayerPricer:
    """Prices layers from one profile; answers are remembered."""

    profile: Profile  # what was measured or estimated
    common: Links | None = None  # prices communication with devices of other types; None: there are none
    # what single strategies do; the same for profiles that differ in seconds of compute and of links alone
    works: dict[tuple[str, ParameterSharing, Strategy, int], LayerWork] = field(default_factory=dict)
    sizes: dict[tuple[str, ParameterSharing, Strategy, int], dict[str, Whole]] = field(default_factory=dict)
    points: dict[PointKey, tuple[LayerPoint, ...]] = field(default_factory=dict)  # of the profile; indexed where empty
    compute: float = 1.0  # factor on the seconds of these points
    links: Links = field(init=False)  # prices communication
    _gradients: int = field(init=False)  # bytes of the gradients of the model
    _bucket: int = field(init=False)  # bytes from which on a bucket of them is full
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
        """Indexes the profile."""
        self.links = Links(self.profile)
        self.points = self.points or index_points(self.profile.layers)
        self._gradients = self.profile.graph.trainable * ITEM_BYTES[self.profile.reduce_precision]
        self._bucket = bucket_of(self._gradients)
        overhead = self.profile.overhead
        self._host = {item.name: getattr(overhead, item.name) for item in fields(overhead)}

    @property
    def prices_splitting(self) -> bool:
        """Whether layers cost more under schedules that split backward."""
        return self._host["split_product"] > 0.0 or self._host["split_share"] > 0.0

    def of_group(self, stage_devices: int, group: int) -> LayerPricer:
        """The pricer of the devices of a group of a pipeline; this one where all of the cluster are alike.

        Where a group has devices of several types, this one too: it holds the slowest figures.
        """
        ranks = range(group * stage_devices, (group + 1) * stage_devices)
        kind = self.profile.cluster.type_of(ranks)
        if kind is None:
            return self
        if kind not in self._types:
            self._types[kind] = LayerPricer(self.profile.only(kind), self.links, compute=self.compute)
        return self._types[kind]

    def price(
        self, kind: str, strategy: Strategy, microbatch: int, stages: int, sharing: ParameterSharing = ALONE
    ) -> LayerCost | None:
        """Cost of a layer of a kind.

        Args:
            kind: key into the graph's kinds.
            strategy: takes all devices of the stage.
            microbatch: samples of one micro-batch over the stage; divisible by ``strategy.batch_degree``.
            stages: of the pipeline.
            sharing: with other layers.

        Returns:
            None where the profile holds no point for the strategy's tensor, channel and recompute choice, where it uses
            host memory and the device's link to it is not known, or where it shares pixels of what is no picture, or of
            one that is too small.
        """
        key = (kind, sharing, strategy, microbatch, stages)
        if key not in self._costs:
            self._costs[key] = self._new_price(kind, strategy, microbatch, stages, sharing)
        return self._costs[key]

    def _new_price(
        self, kind: str, strategy: Strategy, microbatch: int, stages: int, sharing: ParameterSharing
    ) -> LayerCost | None:
        points = self._points_of(kind, strategy)
        if points is None:
            return None
        samples = samples_of(self.profile.graph.kinds[kind], strategy, microbatch)
        figures = figures_at(points, samples).times(self.compute)
        plain = None if strategy.split == strategy else self._points_of(kind, strategy.split)
        seconds = 0.0 if plain is None else figures_at(plain, samples).backward * self.compute
        figures = figures.no_quicker_than(seconds)
        again = 0.0 if plain is None else figures.again(seconds)
        return LayerCost(**self._priced(kind, strategy, microbatch, stages, sharing, figures, again))

    def price_many(
        self,
        kind: str,
        strategies: Sequence[Strategy] | Strategies,
        microbatch: int | IntArray,
        stages: int,
        sharing: ParameterSharing = ALONE,
    ) -> LayerCost:
        """``price`` of n strategies at once, to the last bit, in a few microseconds each.

        Args:
            kind: key into the graph's kinds.
            strategies: each takes all devices of its stage; ``Strategies`` spare their conversion.
            microbatch: samples of one micro-batch over the stage, or (n,) of them.
            stages: of the pipeline.
            sharing: with other layers.
        """
        many = strategies if isinstance(strategies, Strategies) else Strategies.of(strategies)
        if kind not in self._curves:
            if not self._by_kind:
                for key, point in self.points.items():
                    self._by_kind.setdefault(key[0], {})[key] = point
            self._curves[kind] = Curves.of(kind, self._by_kind.get(kind, {}))
        curves, shape = self._curves[kind], self.profile.graph.kinds[kind]
        samples = samples_of(shape, many, microbatch)
        if not len(curves.codes) or not len(many):
            return _as_arrays(dict.fromkeys(_NAMES, 0), np.zeros(len(many), dtype=np.bool_))
        figures, valid = curves.at(code_of(many), samples)
        plain, has_plain = curves.backward(code_of(many, **INSIDE), samples)
        valid = valid & self._runs(shape, many)
        seconds = np.where(has_plain, plain * self.compute, 0.0)
        figures = figures.times(self.compute).no_quicker_than(seconds)
        again = np.where(has_plain, figures.again(seconds), 0.0)
        return _as_arrays(self._priced(kind, many, microbatch, stages, sharing, figures, again), valid)

    def covers(self, kind: str, strategy: Strategy) -> bool:
        """Whether the profile holds points for what a device does under a strategy."""
        return points_of(self.points, key_of(kind, strategy)) is not None

    def worked(self, strategy: Strategy) -> Strategy:
        """What a device does under a strategy that the profile must have figures for, as the least strategy."""
        needed = [name for dimension in dimensions() if not dimension.stands_in for name in dimension.runs]
        return replace(Strategy(), **{name: getattr(strategy, name) for name in needed})

    def _points_of(self, kind: str, strategy: Strategy) -> Sequence[LayerPoint] | None:
        if not self._runs(self.profile.graph.kinds[kind], strategy):
            return None
        return points_of(self.points, key_of(kind, strategy))

    def _runs(self, kind: LayerKind, strategy: Either) -> Flag:
        device = self.profile.cluster.device
        return reduce(and_, (dimension.runs_on(device, kind, strategy) for dimension in dimensions()))

    def redistribution(self, output_bytes: int, microbatch: int, left: Strategy, right: Strategy) -> float:
        """Seconds to bring the tensor between two layers from one layout to the other, in one direction."""
        key = (output_bytes * microbatch, layout_of(left), layout_of(right))
        if key not in self._moves:
            self._moves[key] = float(self.redistributions(output_bytes, microbatch, key[1:2], key[2:])[0, 0])
        return self._moves[key]

    def redistributions(
        self, output_bytes: int, microbatch: int, left: Sequence[Layout], right: Sequence[Layout]
    ) -> FloatArray:
        """(A, B): seconds to bring a tensor from each of A layouts to each of B on as many devices, in one direction.

        Two layouts differ within runs of consecutive devices (see ``exchanging``), which exchange what they lack in one
        all-to-all; nothing moves where they are the same. The mean of both directions (see ``received``).

        Args:
            output_bytes: of the tensor, a sample.
            microbatch: samples of one micro-batch over the stage.
            left: layouts as ``layout_of`` gives them.
            right: the same.
        """
        if not left or not right:
            return np.zeros((len(left), len(right)))
        ranks, shares, place = self._exchanges_of(tuple(left), tuple(right))
        held = output_bytes * microbatch * shares * ranks.size / largest(ranks.size - 1, 1)
        sent = Communication(Collective.ALL_TO_ALL, held, ranks, Moment.FORWARD, overlaps=False, cause=LAYOUT)
        seconds = np.asarray(self.links.timed([sent])[0], dtype=np.float64)[place]
        return seconds * passes_with_moves(self.profile)

    def _exchanges_of(
        self, left: tuple[Layout, ...], right: tuple[Layout, ...]
    ) -> tuple[RankGroup, FloatArray, IntArray]:
        """Unlike exchanges between layouts: (n,) groups, (n,) shares of the tensor that each of their devices gets from
        the others, and which of these (A, B) pairs of layouts have."""
        if (left, right) not in self._exchanges:
            both = np.array(left, dtype=np.int64)[:, None], np.array(right, dtype=np.int64)[None, :]
            keys = np.stack((exchanging(*both), received(*both)), axis=-1)
            distinct, place = np.unique(keys.reshape(-1, 2), axis=0, return_inverse=True)
            sizes = distinct[:, 0].astype(np.int64)
            ranks = rank_group(sizes, np.ones_like(sizes), left[0].devices // sizes)
            number: IntArray = place.reshape(keys.shape[:-1])
            self._exchanges[left, right] = (ranks, distinct[:, 1].astype(np.float64), number)
        return self._exchanges[left, right]

    def _priced(
        self,
        name: str,
        strategy: Either,
        microbatch: Whole,
        stages: int,
        sharing: ParameterSharing,
        figures: LayerFigures,
        again: Real,
    ) -> dict[str, Any]:
        """Fields of ``LayerCost``, of one strategy or of many."""
        kind = self.profile.graph.kinds[name].with_copy(sharing.copied, sharing.frozen)
        work = self._work(name, kind, strategy, microbatch, sharing)
        figures = figures.beside(work.edge_bytes, *work.edge_working)
        figures = replace(figures, kept=0) if self.profile.forward_only else figures
        profile, optimizer = self.profile, self.profile.optimizer
        timed = zip(work.communications, self.links.timed(work.communications), strict=True)
        exposed = exposed_by(list(timed), figures, profile.hidden, profile.overlap)
        exchange = 0.0 if self.profile.forward_only else self._exchange(sharing.exchanged, strategy, stages)
        tensors = sum(operator.count for operator in kind.operators if operator.weight_bytes and not operator.frozen)
        on_device = work.state_items - work.host_items
        update = on_device * optimizer.seconds_per_item + tensors * optimizer.seconds_per_tensor
        # masters are read, and cast for the gather
        wide = ITEM_BYTES[profile.parameter_precision]
        update += work.master_items * (wide + profile.copied_bytes) / profile.cluster.device.memory_bandwidth
        item = HostItem(ITEM_BYTES[profile.reduce_precision], wide, optimizer.state_bytes)
        seconds = (figures.forward, figures.backward)
        # ZeRO-2 and 3 reduce gradients when backward ends: their layers leave none to a pass of its own
        weight = where(strategy.parameter_shards > 1, 0.0, weight_seconds(figures.forward, figures.backward - again))
        overhead = profile.overhead
        splitting = overhead.split_product * weight_products(kind) + overhead.split_share * weight
        host = host_traffic(profile.cluster.device, work, seconds, figures.kept, item)
        return {
            "forward": figures.forward,
            "backward": figures.backward - again,
            "recompute": again,
            "forward_exposed": exposed.forward + host.forward,
            "backward_exposed": exposed.backward + host.backward,
            "host": work.microbatch_overhead,
            "step_exposed": exposed.step + exchange + host.step,
            "update": update + host.update,
            "step_host": work.step_overhead,
            "weight": weight,
            "splitting": where(strategy.parameter_shards > 1, 0.0, splitting),
            **self._sizes(name, kind, work, figures, strategy, microbatch, sharing),
        }

    def _sizes(
        self,
        name: str,
        kind: LayerKind,
        work: LayerWork,
        figures: LayerFigures,
        strategy: Either,
        microbatch: Whole,
        sharing: ParameterSharing,
    ) -> dict[str, Whole]:
        if not isinstance(strategy, Strategy):
            return self._bytes(kind, work, figures, strategy, sharing.grouped)
        key = (name, sharing, strategy, microbatch)
        if key not in self.sizes:
            self.sizes[key] = self._bytes(kind, work, figures, strategy, sharing.grouped)
        return self.sizes[key]

    def _work(
        self, name: str, kind: LayerKind, strategy: Either, microbatch: Whole, sharing: ParameterSharing
    ) -> LayerWork:
        if not isinstance(strategy, Strategy):
            return self.work(kind, strategy, microbatch)
        key = (name, sharing, strategy, microbatch)
        if key not in self.works:
            self.works[key] = self.work(kind, strategy, microbatch)
        return self.works[key]

    def work(self, kind: LayerKind, strategy: Either, microbatch: Whole) -> LayerWork:
        """What one device does for a layer of a kind with a micro-batch of so many samples over the stage."""
        context = DimensionContext(
            devices=strategy.devices,
            node_devices=self.profile.cluster.levels[0].size,
            activation_item_bytes=activation_bytes(self.profile.graph.precision),
            gather_item_bytes=ITEM_BYTES[self.profile.gather_precision],
            parameter_item_bytes=ITEM_BYTES[self.profile.parameter_precision],
            reduce_item_bytes=ITEM_BYTES[self.profile.reduce_precision],
            microbatches=1,
            host=self._host,
            accumulates=self.profile.accumulates,
            masters=self.profile.copied_bytes > 0,
            shard_share=self.profile.shard_share,
            pictures=self.profile.pictures,
        )
        work = work_on(kind, strategy, microbatch, context)
        return without_gradients(work) if self.profile.forward_only else work

    def _exchange(self, items: int, strategy: Either, stages: int) -> Real:
        """Seconds to sum the gradients of shared parameters with the other stage's copy, shard by shard.

        ZeRO-1 shards optimizer states only: its gradients are whole when they are summed (Megatron-LM's
        ``finalize_model_grads``). In a cluster of several types of devices the slower links count.
        """
        if items == 0 or stages == 1:
            return 0.0
        devices = strategy.devices
        size = items / (strategy.weight_slices * strategy.parameter_shards) * ITEM_BYTES[self.profile.reduce_precision]
        group = RankGroup(2, devices * (stages - 1), devices)
        links = self.common or self.links
        return links.timed([Communication(Collective.ALL_REDUCE, size, group, Moment.STEP, overlaps=False)])[0]

    def _copied_bucket(self, strategy: Either, largest_gradient: Whole) -> Whole:
        """Bytes of a bucket on its way to the ranks that share the optimizer's states (ZeRO-1), and of this rank's part
        of the sum. The gradient that fills a bucket goes beyond its size."""
        if self.profile.unbuffered:
            return 0
        return up(sent_bucket(strategy, least(self._bucket + largest_gradient, self._gradients)))

    def _bytes(
        self, kind: LayerKind, work: LayerWork, figures: LayerFigures, strategy: Either, grouped: bool
    ) -> dict[str, Whole]:
        profile, optimizer = self.profile, self.profile.optimizer
        gather, summed = ITEM_BYTES[profile.gather_precision], ITEM_BYTES[profile.reduce_precision]
        wide, narrow = ITEM_BYTES[profile.parameter_precision], work.narrow_items
        bucket = where(strategy.token_degree > 1, profile.bucket_bytes, 0)
        gradients = up(work.gradient_items * (summed + bucket))
        lasting_gradients = up(work.lasting_gradient_items * (summed + bucket))
        reduced = where(profile.unbuffered, 0.0, work.reduce_items)
        transient = where(profile.unbuffered, 0.0, work.transient_items)
        gathered_gradients, at_use = up(reduced * gather), work.gathered_items + transient
        lasting = at_use * gather + gathered_gradients if grouped else work.gathered_items * gather
        on_device = work.state_items - work.host_items
        copies, frozen, passing = copied_bytes(profile, kind, work, strategy)
        full, new, cast = new_gradient_bytes(profile, kind, work, strategy)
        return {
            "parameters": up(work.parameter_items * wide - narrow * (wide - profile.copied_bytes)) + kind.buffer_bytes,
            "gradients": where(work.gradients_persist, gradients, lasting_gradients),
            "formed_gradients": where(work.gradients_persist, 0, gradients - lasting_gradients),
            "states": up(on_device * optimizer.state_bytes + work.master_items * wide),
            "kept": where(work.host_kept > 0, 0, figures.kept),
            "returning": where(work.host_kept > 0, figures.kept, 0),
            "gathered": up(lasting),
            "gather": 0 if grouped else up(transient * gather),
            "gathering": up(at_use * gather),
            "full_gradients": 0 if grouped else gathered_gradients,
            "reducing": up(reduced * summed),
            "working": largest(figures.working, figures.kept) + passing,
            "forward_working": figures.forward_working + passing,
            "passing_gradients": up(work.gradient_items * profile.passing_bytes),
            "accumulated": largest(up(work.reduce_items * summed) - gradients, 0) if profile.accumulates else 0,
            "copies": copies,
            "frozen_copies": frozen,
            "new_gradient": new,
            "cast_gradient": cast,
            "bucket": self._copied_bucket(strategy, full),
            # the worst moment of a block is in the backward of a matmul, that of the model's ends in the loss
            "at_weights": largest(figures.working if Recompute.FULL in kind.kept else 0, figures.kept)
            + (0 if profile.copied_bytes else full),
            "updating": up(on_device * optimizer.working_bytes * optimizer.working_share),
        }
