"""Small random questions for the search, over every dimension it knows."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

from galvatron_lite.model.graph import LayerKind, Recompute, Routing
from galvatron_lite.parallelism.backends import ANY
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.registry import dimensions
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.shapes import Request
from galvatron_lite.search.space import Fixed, Space
from tests.factories import random_profile

FREE = (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE_1P, Schedule.ZERO_BUBBLE_2P)
"""Schedules whose stages may have any boundaries."""


UNIFORM = (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE_V)
"""Schedules whose blocks are alike and shared out evenly."""


@dataclass(frozen=True, slots=True)
class Few(Space):
    """A random part of all that can be priced, whatever backends offer: some layouts, some strategies of each.

    Attributes:
        seed: of the choice, which is the same for all kinds of layers as far as they allow it.
        most: strategies of a kind.
    """

    seed: int = 0
    most: int = 6

    def strategies(self, kind: str, devices: int, fixed: Fixed) -> tuple[Strategy, ...]:
        """Some legal strategies, in order."""
        known, found = self.graph.kinds[kind], dict.fromkeys(some_strategies(self.seed, devices, 4 * self.most))
        legal = [strategy for strategy in found if may(known, strategy) and fixed.allows(strategy)]
        return tuple(sorted(legal[: self.most]))


@lru_cache(maxsize=64)
def some_strategies(seed: int, devices: int, wanted: int) -> tuple[Strategy, ...]:
    """Random strategies of a stage, over every field, in three layouts so that layers can meet."""
    draw = random.Random(f"{seed} {devices}")
    whole = [degrees for degrees in product(divisors(devices), repeat=4) if prod(degrees) == devices]
    layouts = [(*draw.choice(whole), draw.random() < 0.5) for _ in range(3)]
    return tuple(random_strategy(draw, *draw.choice(layouts)) for _ in range(wanted))


def random_strategy(draw: random.Random, data: int, zero: int, context: int, tensor: int, shared: bool) -> Strategy:
    """A strategy with these degrees, or with replicas and shards in each other's place."""
    data, zero = draw.choice([(data, zero), (zero, data), (data * zero, 1), (1, data * zero)])
    stages = [1, 2, 3] if zero > 1 else [0, 0, 1, 2, 3] if context > 1 else [0]
    return Strategy(
        data=data,
        zero=zero,
        zero_stage=draw.choice(stages),
        tensor=tensor,
        sequence_parallel=tensor > 1 and shared,
        recompute=draw.choice(list(Recompute)),
        context=context,
        expert=draw.choice([1, 1, *divisors(data * zero * context)]),
        ulysses=context > 1 and draw.random() < 0.5,
        offload=draw.choice([Offload.NONE, Offload.NONE, *Offload]),
    )


def may(kind: LayerKind, strategy: Strategy) -> bool:
    """Whether a kind of layer allows a strategy at all."""
    tensor = kind.tensor_degrees % strategy.tensor == 0 and (kind.sequence_parallel or not strategy.sequence_parallel)
    experts = strategy.expert == 1 or kind.dims.experts % strategy.expert == 0 < kind.expert_parameters
    return tensor and experts and strategy.recompute in kind.kept


@dataclass(frozen=True, slots=True)
class Instance:
    """A question.

    Attributes:
        profile: what layers cost.
        devices, batch, schedules, fixed, space: what is asked.
    """

    profile: Profile
    devices: int
    batch: int
    schedules: tuple[Schedule, ...]
    fixed: Fixed
    space: Space

    def request(self, budget: int) -> Request:
        """As the search takes it."""
        return Request(self.profile.graph, self.devices, self.batch, budget, self.fixed, self.schedules, self.space)


def random_instance(seed: int, most: int = 6) -> Instance:
    """A random model, cluster, part of the space, and pins."""
    draw = random.Random(seed)
    devices = draw.choice([1, 2, 2, 3, 4, 4, 4])
    blocks = draw.randint(1, 2 if devices == 4 else 3)
    profile = random_profile(draw, devices=devices, blocks=blocks, alike=draw.random() < 0.5, tied=draw.random() < 0.4)
    profile = varied(profile, draw) if draw.random() < 0.7 else profile
    space = Few(profile.graph, profile.cluster.levels[0].size, backend=ANY, seed=seed, most=most)
    schedules = tuple(draw.sample(FREE, draw.randint(1, len(FREE))))
    batch = draw.choice([3, 6]) if devices == 3 else draw.choice([2, 4, 6] if devices == 2 else [4])
    return Instance(profile, devices, batch, schedules, pins(profile, devices, batch, draw), space)


def uniform_instance(seed: int) -> Instance:
    """The same with more blocks and fewer strategies, for schedules that run several stages a group of devices."""
    draw = random.Random(seed)
    devices, blocks = draw.choice([2, 4]), draw.randint(4, 6)
    profile = random_profile(draw, devices=devices, blocks=blocks, alike=draw.random() < 0.5, tied=draw.random() < 0.4)
    profile = varied(profile, draw) if draw.random() < 0.7 else profile
    space = Few(profile.graph, profile.cluster.levels[0].size, backend=ANY, seed=seed, most=3)
    fixed = Fixed(pipeline=2, virtual=draw.choice([None, 2]))
    schedules = tuple(draw.sample(UNIFORM, draw.randint(1, 2)))
    return Instance(profile, devices, draw.choice([2, 4, 6]), schedules, fixed, space)


def varied(profile: Profile, draw: random.Random) -> Profile:
    """The profile with nodes, and with all that measured and published software may have besides."""
    cluster, (level,) = profile.cluster, profile.cluster.levels
    node = draw.choice([degree for degree in (1, 2, cluster.devices) if cluster.devices % degree == 0])
    between = replace(level, size=cluster.devices // node, bandwidth=level.bandwidth / draw.choice([1, 10]))
    host = {"host_bandwidth": draw.choice([1e8, 1e9]), "host_memory_bandwidth": 1e9} if draw.random() < 0.5 else {}
    groups = tuple(replace(group, device=replace(group.device, **host)) for group in cluster.groups)
    kinds = {name: richer(kind, draw) for name, kind in profile.graph.kinds.items()}
    causes = ("data", "zero", "tensor", "tensor-async", "zero.gather", "context", "expert")
    return replace(
        profile,
        graph=replace(profile.graph, kinds=kinds),
        cluster=replace(cluster, groups=groups, levels=(replace(level, size=node), between)),
        hidden={cause: draw.choice([0.0, 0.5, 1.0]) for cause in causes if draw.random() < 0.5},
        overhead=replace(profile.overhead, microbatch=draw.choice([0.0, 2e-5])),
        straggling=draw.choice([0.0, 0.05]),
        scattered_sends=draw.random() < 0.5,
        steps_overlap=draw.random() < 0.5,
        bucket_bytes=draw.choice([0, 2]),
        passing_bytes=draw.choice([0, 4]),
        accumulates=draw.random() < 0.3,
        shard_share=draw.choice([0.0, 0.01]),
        unbuffered=draw.random() < 0.2,
    )


def richer(kind: LayerKind, draw: random.Random) -> LayerKind:
    """The kind with attention, or experts, or neither."""
    if not kind.name.startswith("block"):
        return kind
    dims = replace(kind.dims, heads=4, kv_heads=draw.choice([1, 2, 4]), hidden=draw.choice([16, 512]))
    attentive = replace(kind, dims=dims) if draw.random() < 0.6 else kind
    if draw.random() < 0.6:
        return attentive
    return replace(
        attentive,
        dims=replace(attentive.dims, experts=4),
        expert_parameters=draw.randint(1, kind.parameters.tensor),
        dispatched_bytes=draw.randint(100, 5000),
        routing=Routing(2, unique=bool(draw.choice([0, 2])), excess=0.5),
    )


def pins(profile: Profile, devices: int, batch: int, draw: random.Random) -> Fixed:
    """Nothing pinned half of the time; else some of what a user may pin."""
    if draw.random() < 0.5:
        return Fixed()
    sometimes = lambda options: draw.choice(options) if draw.random() < 0.25 else None  # noqa: E731
    layer = draw.choice(profile.graph.layers).name
    strategy = (("tensor", 1), ("zero_stage", 0), ("recompute", "none"))
    return Fixed(
        pipeline=sometimes([degree for degree in (1, 2) if devices % degree == 0]),
        microbatches=sometimes([count for count in (1, 2, 3) if batch % count == 0]),
        strategy=(draw.choice(strategy),) if draw.random() < 0.2 else (),
        layers=((draw.choice([layer, "l*"]), *draw.choice(strategy)),) if draw.random() < 0.3 else (),
        forbidden=tuple(draw.sample([one.name for one in dimensions()], draw.choice([0, 0, 1]))),
    )
