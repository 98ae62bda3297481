"""Where the time of a step goes, part by part; the parts add up to the predicted step. No torch here.

The account is that of the busiest group of devices, as ``cost.step.breakdown``'s: what it computes, what communication
delays it by (``exposed``), what it updates, what its host takes, and what is left: waiting for other stages, and for
the slowest of many devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from galvatron_lite.cost.groups import hidden_share
from galvatron_lite.cost.layer import LayerCost
from galvatron_lite.cost.stage import StageCost
from galvatron_lite.cost.step import straggling
from galvatron_lite.explainer.exposed import caused_by
from galvatron_lite.explainer.operations import Operations
from galvatron_lite.explainer.priced import Priced
from galvatron_lite.explainer.schema import TimeAccount, TimeClass, TimePart
from galvatron_lite.parallelism.pipeline.cost import NAME as PIPELINE

REDISTRIBUTION, SHARED, OFFLOAD = "redistribution", "shared parameters", "host memory"
BUBBLE, SLOWEST = "other stages (bubble)", "the slowest of many devices"
_ROUNDING = 1e-9
"""Share of a step below which what is left over is rounding."""

Key = tuple[TimeClass, str]
Item = tuple[Key, float, float]
"""What it is, seconds of the step, and those of communication that run behind compute."""


def account(priced: Priced) -> TimeAccount:
    """Where the time of a plan's step goes."""
    group = priced.busiest
    operations = Operations(priced.pricer_of(priced.stages_of(group)[0]))
    sums: dict[Key, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for stage in priced.stages_of(group):
        for key, seconds, hidden in _stage(priced, stage, operations):
            sums[key][0] += seconds
            sums[key][1] += hidden
    for key, seconds in _waiting(priced, sum(own for own, _ in sums.values())):
        sums[key][0] += seconds
    parts = [TimePart(*key, seconds, max(hidden, 0.0)) for key, (seconds, hidden) in sums.items()]
    least = _ROUNDING * priced.prediction.step_seconds
    shown = sorted((part for part in parts if part.seconds > 0 or part.hidden_seconds > least), key=_largest_first)
    return TimeAccount(priced.prediction.step_seconds, group, tuple(shown), operations.origin)


def _largest_first(part: TimePart) -> tuple[float, str]:
    return -part.seconds, part.name


def _waiting(priced: Priced, own: float) -> Iterator[tuple[Key, float]]:
    """What of the step is neither work nor communication of the busiest group: host work once a step, and waiting."""
    profile, seconds = priced.pricer.profile, priced.prediction.step_seconds
    alone = seconds / straggling(profile, priced.plan.devices)
    yield (TimeClass.HOST, "once a step"), profile.overhead.step
    left = alone - profile.overhead.step - own
    if left > _ROUNDING * seconds:
        yield (TimeClass.WAITING, BUBBLE if len(priced.groups) > 1 else SLOWEST), left
    if seconds - alone > _ROUNDING * seconds:
        yield (TimeClass.WAITING, SLOWEST), seconds - alone


def _stage(priced: Priced, stage: int, operations: Operations) -> Iterator[Item]:
    """What a stage takes of a step."""
    cost, times = priced.stages[stage], priced.shape.microbatches
    for place, layer in zip(priced.ranges[stage], cost.layers, strict=True):
        yield from _compute(priced, place, layer, operations)
        yield from _communication(priced, stage, place, layer)
        yield (TimeClass.OPTIMIZER, "update"), layer.update, 0.0
        yield (TimeClass.HOST, "layers"), times * layer.host + layer.step_host, 0.0
    yield (TimeClass.COMMUNICATION, REDISTRIBUTION), times * cost.moving, 0.0
    sends = times * (cost.times.send_forward + cost.times.send_backward)
    hidden = hidden_share(priced.pricer.profile)
    yield (TimeClass.COMMUNICATION, PIPELINE), (1.0 - hidden) * sends, hidden * sends
    handing = _handing_over(priced, stage)
    yield (TimeClass.HOST, "sends and receives"), times * handing, 0.0
    yield (TimeClass.HOST, "micro-batches"), times * max(_between(cost) - handing, 0.0), 0.0


def _handing_over(priced: Priced, stage: int) -> float:
    """The host's fixed seconds a micro-batch for what a stage sends to and receives from its neighbours."""
    inside, last = priced.ranges[stage], len(priced.strategies)
    neighbours = (inside.start > 0) + (inside.stop < last)
    return 2 * neighbours * priced.pricer_of(stage).profile.overhead.pipeline


def _between(cost: StageCost) -> float:
    """Host seconds a micro-batch that belong to no layer."""
    layers = sum(layer.forward_seconds + layer.backward_seconds for layer in cost.layers)
    return max(float(cost.times.forward + cost.times.backward - layers - cost.moving), 0.0)


def _compute(priced: Priced, place: int, layer: LayerCost, operations: Operations) -> Iterator[Item]:
    times, kind = priced.shape.microbatches, priced.pricer.profile.graph.layers[place].kind
    forward, backward = operations.shares(kind, priced.strategies[place], priced.shape.microbatch)
    for name, share in forward.items():
        yield (TimeClass.COMPUTE, name), times * share * layer.forward, 0.0
    for name, share in backward.items():
        yield (TimeClass.COMPUTE, name), times * share * layer.backward, 0.0
    yield (TimeClass.RECOMPUTE, "computing again"), times * layer.recompute, 0.0


def _communication(priced: Priced, stage: int, place: int, layer: LayerCost) -> Iterator[Item]:
    """Communication of a layer by cause; what no dimension sends is of shared parameters, or goes to host memory."""
    times, kind = priced.shape.microbatches, priced.pricer.profile.graph.layers[place].kind
    strategy, size = priced.strategies[place], priced.shape.microbatch
    told = 0.0
    for cause, own in caused_by(priced.pricer_of(stage), kind, strategy, size, layer).items():
        exposed = times * own.microbatch + own.step
        told += exposed
        yield (TimeClass.COMMUNICATION, cause), exposed, times * own.microbatch_all + own.step_all - exposed
    left = times * (layer.forward_exposed + layer.backward_exposed) + layer.step_exposed - told
    tied = priced.sharing_of_layer(stage, place).exchanged > 0 and priced.shape.stages > 1
    if abs(left) > _ROUNDING * told or not told:
        yield (TimeClass.COMMUNICATION, SHARED if tied and not strategy.offloads_activations else OFFLOAD), left, 0.0
