"""Costs of pipeline parallelism: stages send the boundary tensor forward and its gradient back.

A pipeline is no choice of a single layer, hence no ``Dimension``; ``cost`` and ``search`` call these functions.
"""

from __future__ import annotations

from functools import lru_cache

from galvatron_lite.arrays import Real, Whole, largest, least
from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.model.graph import LayerKind, OperatorClass
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.parallelism.pipeline.schedule import Moments, Schedule
from galvatron_lite.parallelism.strategy import Strategy

NAME = "pipeline"


def boundary_bytes(output_bytes: int, microbatch: int, sender: Strategy) -> int:
    """Return the bytes of the boundary tensor on one device of the sending stage, for one micro-batch.

    Args:
        output_bytes: bytes per sample of the last layer's output.
        microbatch: samples of one micro-batch over the whole stage.
        sender: strategy of the last layer of the sending stage.
    """
    tokens = sender.context * (sender.tensor if sender.sequence_parallel else 1)
    return -(-output_bytes * microbatch // (sender.batch_degree * tokens * sender.spatial * sender.channels))


def transfer(size: int, stage_devices: int, stride: int | None = None) -> Communication:
    """Return the send of a device to its counterpart in another stage, while all devices of the stage do the same.

    Args:
        size: bytes.
        stage_devices: devices of one stage.
        stride: difference of the two ranks, see ``stride_between``; None: neighbouring groups of devices.
    """
    group = RankGroup(2, stride or stage_devices, stage_devices)
    return Communication(Collective.SEND_RECV, size, group, Moment.FORWARD, overlaps=False, cause=NAME)


def stride_between(first: int, second: int, stage_devices: int, node_devices: int) -> int:
    """Return a stride with the links between two groups of devices: a node or more if they are in different nodes."""
    nodes = [group * stage_devices // node_devices for group in (first, second)]
    return stage_devices if nodes[0] == nodes[1] else max(stage_devices, node_devices)


def fills(schedule: Schedule, held: int, microbatches: int) -> bool:
    """Whether a group of one stage holds ``held`` micro-batches only before its first backward.

    It does if these are all of several micro-batches of a step (GPipe; 1F1B with as many stages after it). That
    backward computes gradients of weights; the first backward of zero-bubble schedules does not, but leaves memory for
    the pass that does.
    """
    return schedule.simple and held == microbatches > 1


@lru_cache(maxsize=4096)
def chunks_in_flight(schedule: Schedule, pipeline: int, group: int, microbatches: int, virtual: int) -> Moments:
    """See ``Schedule.moments``."""
    return schedule.moments(pipeline, group, microbatches, virtual)


def buffer_bytes(left: Whole, right: Whole, microbatches: int, schedule: Schedule, *, counted: bool = True) -> Whole:
    """Return the bytes of send and receive buffers of a stage, beyond what its layers save.

    From the stage before: an activation received ahead of its pass and a gradient in flight back (``left`` bytes each,
    0 in the first stage). To the next stage: an activation in flight and a gradient received (``right`` bytes each, 0
    in the last stage). The first layer saves the inputs of micro-batches in flight. With one micro-batch a step nothing
    is received ahead; the activation sent lives until the step ends, and the gradient received as long as backward (if
    that is split, it is part of what passes of weights hold). 0 if the profile does not count buffers.
    """
    ahead, behind = held_messages(microbatches, schedule)
    return (left * ahead + right * behind) * counted


def held_messages(microbatches: int, schedule: Schedule) -> tuple[int, int]:
    """Return how many messages before and after a stage ``buffer_bytes`` counts."""
    return (2, 2) if microbatches > 1 else (0, 1 if schedule.splits_backward else 2)


def weight_seconds(forward: Real, backward: Real) -> Real:
    """Return the seconds of a layer's gradients of weights, from its compute (``backward`` without recomputation).

    A matmul with weights runs once in forward and twice in backward, and other operators take as long in both, so the
    gradients of weights take the time by which backward is longer (Qi et al. 2023, table 5: within 5 % of
    measurements).
    """
    return least(largest(backward - forward, 0.0), forward)


def weight_products(kind: LayerKind) -> int:
    """Count the products with weights whose gradients zero-bubble schedules compute in a separate pass."""
    return sum(
        operator.count
        for operator in kind.operators
        if operator.kind in _PRODUCTS and operator.weight_bytes and not operator.frozen
    )


_PRODUCTS = frozenset({OperatorClass.MATMUL, OperatorClass.CONVOLUTION})
