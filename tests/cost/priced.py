"""Plans priced for tests, and a simulation of their events."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from galvatron_lite.cluster.cluster import Cluster, Collective, Device, DeviceGroup, Level
from galvatron_lite.cost.layer import ALONE, ParameterSharing
from galvatron_lite.model.graph import (
    LayerKind,
    Operator,
    OperatorClass,
    Recompute,
    Routing,
    SplitDims,
    TensorSplit,
)
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.pipeline.times import StageTimes
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.schema import Schedule
from galvatron_lite.profiler.schema import (
    CollectiveFit,
    CollectivePoint,
    HostOverhead,
    LayerPoint,
    OptimizerCost,
    Overlap,
    Profile,
)
from tests.factories import make_graph, make_profile

DEVICES = 128
STAGES = (1, 2, 6, 8, 12, 16, 32, 64, 128)


@dataclass(frozen=True)
class Case:
    """One call of a pricer with several strategies of one stage size."""

    profile: Profile
    kind: str
    strategies: tuple[Strategy, ...]
    microbatch: int
    stages: int
    sharing: ParameterSharing


def cases(seed: int, count: int, each: int) -> Iterator[Case]:
    """``count`` cases of up to ``each`` strategies."""
    draw = random.Random(seed)
    for number in range(count):
        profile = profile_of(draw, measured=number % 2 == 1)
        devices, kind = draw.choice(STAGES), draw.choice(sorted(profile.graph.kinds))
        strategies = tuple(dict.fromkeys(strategy_of(draw, devices) for _ in range(each)))
        wide = max(strategy.batch_degree for strategy in strategies) * draw.choice((1, 2, 3))
        sharing = draw.choice((ALONE, ParameterSharing(grouped=True), ParameterSharing(copied=1000, exchanged=4000)))
        yield Case(profile, kind, strategies, wide, draw.choice(divisors(DEVICES // devices)), sharing)


def strategy_of(draw: random.Random, devices: int) -> Strategy:
    """A strategy that takes so many devices."""
    tensor = draw.choice([degree for degree in divisors(devices) if degree <= 8])
    context = draw.choice([degree for degree in divisors(devices // tensor) if degree <= 4])
    rest = devices // tensor // context
    zero = draw.choice(divisors(rest))
    stage = draw.choice((1, 2, 3) if zero > 1 else (0, 1, 3) if context > 1 else (0,))
    expert = draw.choice([1, *(degree for degree in divisors(devices) if degree <= 16)])
    return Strategy(
        data=rest // zero, zero=zero, zero_stage=stage, tensor=tensor,
        sequence_parallel=tensor > 1 and draw.random() < 0.5, recompute=draw.choice(list(Recompute)),
        context=context, expert=expert, expert_tensor=draw.choice((0, 1, 2)) if expert > 1 else 0,
        ulysses=context > 1 and draw.random() < 0.5, offload=draw.choice(list(Offload)),
    )  # fmt: skip


def cluster_of(draw: random.Random) -> Cluster:
    """Three levels with all that a level can have."""
    device = Device(
        "gpu", 2**36, 1e12, {"bf16": 1e14}, context=2**28, source="test",
        host_bandwidth=draw.choice((0.0, 2e10, 2e10)), host_memory_bandwidth=5e10,
    )  # fmt: skip
    mesh = draw.choice(((), ((2, 0.3), (4, 0.6))))
    levels = (
        Level("node", 8, 3e11, 3e-6, draw.choice((1.0, 1.2)), 0.8, mesh=mesh, half_size=1e5),
        Level("rack", 4, 1e11, 8e-6, draw.choice((1.0, 1.5)), 0.9, lanes=draw.choice((1, 4, 8)), start=1e-5),
        Level("cluster", 4, 5e10, 2e-5, 1.1, 0.7, lanes=8, half_size=draw.choice((0.0, 2e6)), start=2e-5),
    )
    return Cluster("three levels", (DeviceGroup(device, DEVICES),), levels)


def profile_of(draw: random.Random, measured: bool) -> Profile:
    """A profile of a dense block, a mixture, an embedding and a head; ``measured``: with collectives and host times."""
    kinds = [_block(draw), _mixture(draw), _embedding(), _head(draw)]
    points = [point for kind in kinds for point in _points(draw, kind)]
    profile = make_profile(
        make_graph(kinds, [kind.name for kind in kinds]), points, cluster_of(draw),
        optimizer=OptimizerCost("adamw", 12, 1e-11, 1e-6, 4.0, 0.5),
        overlap=draw.choice((Overlap(1.1, 1.3), Overlap(1.0, 1.05))),
    )  # fmt: skip
    hidden = draw.choice(({}, {"tensor-async": 0.6, "data": 0.7, "zero.gather": 0.2, "context": 0.9, "expert": 0.1}))
    profile = replace(profile, hidden=hidden, bucket_bytes=draw.choice((0, 4)), passing_bytes=draw.choice((0, 2)))
    if not measured:
        return profile
    host = HostOverhead(3e-5, 2e-5, 1e-4, 1e-5, 4e-6, 1e-12, draw.choice((0.0, 2e-12)), 1e-5)
    return replace(profile, overhead=host, collectives=tuple(_measured(draw)), fits=tuple(_fits(draw)))


def _measured(draw: random.Random) -> Iterator[CollectivePoint]:
    for sort in Collective:
        for size, stride in ((2, 1), (4, 1), (8, 1), (4, 8), (2, 4)):
            for siblings in draw.sample((1, 2, 4, 8, 16), 2):
                for power in range(10, 26, draw.choice((3, 4))):
                    seconds = 1e-5 + 2.0**power / draw.uniform(5e10, 2e11)
                    yield CollectivePoint(sort, size, stride, siblings, 2**power, seconds)


def _fits(draw: random.Random) -> Iterator[CollectiveFit]:
    for sort in Collective:
        for size, stride in ((2, 1), (4, 1), (16, 1), (2, 2)):
            yield CollectiveFit(sort, size, stride, draw.choice((1, 8)), draw.uniform(1e-6, 1e-5), 8e10, 0.1)


def _points(draw: random.Random, kind: LayerKind) -> Iterator[LayerPoint]:
    for tensor in (1, 2, 3, 4, 8):
        for shared in (False, True) if tensor > 1 else (False,):
            for recompute in kind.kept:
                forward, kept = draw.uniform(1e-4, 1e-3) / tensor, draw.uniform(1e6, 1e7) / tensor
                again = {Recompute.NONE: 0.0, Recompute.SELECTIVE: 0.3, Recompute.FULL: 1.0}[recompute]
                for count in draw.choice(((1, 2, 4, 8), (2,), (1, 3))):
                    line = draw.uniform(0.9, 1.1) * count
                    yield LayerPoint(
                        kind.name, count, tensor, shared, recompute, forward * line, (2 + again) * forward * line,
                        int(kept * line), int(1.3 * kept * line), int(1.1 * kept * line),
                    )  # fmt: skip


def _operators(again: tuple[str, ...], precision: str) -> tuple[Operator, ...]:
    def one(name: str, kind: OperatorClass, shape: tuple[int, ...], weights: int) -> Operator:
        return Operator(name, kind, shape, 1, 1, 1, 1, 1, weights, again=name in again, precision=precision)

    return (
        one("qkv", OperatorClass.MATMUL, (64, 256, 512), 2 * 256 * 512),
        one("core", OperatorClass.ATTENTION, (8, 2, 64, 64, 32), 0),
        one("mlp", OperatorClass.MATMUL, (64, 256, 1024), 2 * 256 * 1024),
        one("norm", OperatorClass.MEMORY, (64 * 256,), 4 * 256),
    )


def _block(draw: random.Random) -> LayerKind:
    again = draw.choice(((), ("core",), ("qkv", "core"), ("mlp",)))
    empty = TensorSplit()
    operators, regathers = _operators(again, draw.choice(("", "fp8"))), draw.choice((0, 2))
    return LayerKind(
        "block", TensorSplit(400_000, 1000, 512), operators,
        dict.fromkeys(Recompute, empty), empty, empty, 2**18, 2**18 + 512, SplitDims(sequence=512, hidden=256, heads=8),
        tensor_degrees=8, tensor_collectives=4, sequence_parallel=True, buffer_bytes=64, regathers=regathers,
        regathers_recomputed=regathers,
    )  # fmt: skip


def _mixture(draw: random.Random) -> LayerKind:
    return replace(
        _block(draw), name="mixture", parameters=TensorSplit(4_000_000, 0, 640), expert_parameters=3_600_000,
        dispatched_bytes=2**20, routing=Routing(4, unique=bool(draw.choice((0, 4)))),
    )  # fmt: skip


def _embedding() -> LayerKind:
    empty = TensorSplit()
    return LayerKind(
        "embedding", TensorSplit(1_000_000, 0, 0), (), {Recompute.NONE: empty}, empty, empty, 2048, 2**18,
        SplitDims(sequence=512), tensor_degrees=8, tensor_collectives=1, tensor_gathers=0, tensor_scatters=1,
        sequence_parallel=True,
    )  # fmt: skip


def _head(draw: random.Random) -> LayerKind:
    empty = TensorSplit()
    return LayerKind(
        "head", TensorSplit(1_000_000, 0, 256), (), {Recompute.NONE: empty, Recompute.FULL: empty}, empty, empty,
        2**18, 8, SplitDims(sequence=512, vocab=4000), tensor_degrees=8, tensor_collectives=1, tensor_gathers=1,
        tensor_scatters=0, sequence_parallel=True, gathered_output_bytes=draw.choice((0, 2**22)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PassEvent:
    """One pass of one micro-batch on one stage."""

    stage: int  # stage, microbatch: which
    microbatch: int
    forward: bool  # whether it is a forward pass
    start: float  # start, end: seconds since the step began
    end: float


def order_of(schedule: Schedule, stages: int, stage: int, microbatches: int) -> list[tuple[bool, int]]:
    """What a stage does, in order: (whether it is a forward pass, micro-batch)."""
    ahead = microbatches if schedule is Schedule.GPIPE else min(microbatches, stages - stage)
    order = [(True, index) for index in range(ahead)]
    for index in range(microbatches):
        order.append((False, index))
        if ahead + index < microbatches:
            order.append((True, ahead + index))
    return order


def simulate(stages: Sequence[StageTimes], microbatches: int, schedule: Schedule) -> list[PassEvent]:
    """Every pass of a step, each as early as its stage and its input allow; transfers delay, but occupy no stage."""
    orders = [order_of(schedule, len(stages), index, microbatches) for index in range(len(stages))]
    ends: dict[tuple[int, bool, int], float] = {}
    clock, done, events = [0.0] * len(stages), [0] * len(stages), []
    waiting = True
    while waiting:
        waiting = False
        for index, order in enumerate(orders):
            while done[index] < len(order):
                forward, microbatch = order[done[index]]
                ready = _ready(stages, ends, index, forward, microbatch)
                if ready is None:
                    break
                start = max(clock[index], ready)
                clock[index] = start + (stages[index].forward if forward else stages[index].backward)
                ends[index, forward, microbatch] = clock[index]
                events.append(PassEvent(index, microbatch, forward, start, clock[index]))
                done[index] += 1
                waiting = True
    return events


def _ready(
    stages: Sequence[StageTimes], ends: dict[tuple[int, bool, int], float], index: int, forward: bool, microbatch: int
) -> float | None:
    """When the input of a pass is there; None while that is not known."""
    if forward:
        if index == 0:
            return 0.0
        end = ends.get((index - 1, True, microbatch))
        return None if end is None else end + stages[index - 1].send_forward
    if index == len(stages) - 1:
        return ends.get((index, True, microbatch))
    end = ends.get((index + 1, False, microbatch))
    return None if end is None else end + stages[index + 1].send_backward


def makespan(events: Sequence[PassEvent]) -> float:
    """Seconds from the first start to the last end."""
    return max(event.end for event in events)
