"""Small random questions for the search, over every dimension it knows."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.parallelism.registry import DIMENSIONS
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.shapes import Request
from galvatron_lite.search.space import Fixed, Space
from tests.factories import random_profile

FREE = (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE_1P, Schedule.ZERO_BUBBLE_2P)
"""Schedules whose stages may have any boundaries."""


@dataclass(frozen=True, slots=True)
class Few(Space):
    """A random part of a space: some layouts, some strategies of each, the same for all kinds of layers.

    Attributes:
        seed: of the choice.
        most: strategies of a kind.
    """

    seed: int = 0
    most: int = 6

    def strategies(self, kind: str, devices: int, fixed: Fixed) -> tuple[Strategy, ...]:
        """Some of what the whole space offers, in its order."""
        every = Space.strategies(self, kind, devices, fixed)
        luck = {strategy: self._luck(strategy) for strategy in every}
        return tuple(sorted(sorted(every, key=lambda strategy: luck[strategy])[: self.most]))

    def _luck(self, strategy: Strategy) -> float:
        """Little for what is to be chosen; of one layout much the same, so that layers can meet."""
        own = (strategy.batch_degree, strategy.context, strategy.tensor, strategy.sequence_parallel)
        return random.Random(f"{self.seed} {own}").random() + random.Random(f"{self.seed} {strategy!r}").random()


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
    space = Few(profile.graph, profile.cluster.levels[0].size, seed=seed, most=most)
    schedules = tuple(draw.sample(FREE, draw.randint(1, len(FREE))))
    batch = draw.choice([3, 6]) if devices == 3 else draw.choice([2, 4, 6] if devices == 2 else [4])
    return Instance(profile, devices, batch, schedules, pins(profile, devices, batch, draw), space)


def varied(profile: Profile, draw: random.Random) -> Profile:
    """The profile with nodes, and with all that measured and published software may have besides."""
    cluster, (level,) = profile.cluster, profile.cluster.levels
    node = draw.choice([degree for degree in (1, 2, cluster.devices) if cluster.devices % degree == 0])
    between = replace(level, size=cluster.devices // node, bandwidth=level.bandwidth / draw.choice([1, 10]))
    causes = ("data", "zero", "tensor", "tensor-async", "zero.gather", "context", "expert")
    return replace(
        profile,
        cluster=replace(cluster, levels=(replace(level, size=node), between)),
        hidden={cause: draw.choice([0.0, 0.5, 1.0]) for cause in causes if draw.random() < 0.5},
        overhead=replace(profile.overhead, microbatch=draw.choice([0.0, 2e-5])),
        straggling=draw.choice([0.0, 0.05]),
        scattered_sends=draw.random() < 0.5,
        bucket_bytes=draw.choice([0, 2]),
        passing_bytes=draw.choice([0, 4]),
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
        forbidden=tuple(draw.sample([one.name for one in DIMENSIONS], draw.choice([0, 0, 1]))),
    )
