"""Pipeline parallelism: stages send the boundary tensor forward and its gradient back.

Not a choice of a single layer, so no ``Dimension``; ``cost`` and ``search`` use these functions instead.
"""

from __future__ import annotations

from galvatron_lite.cluster.cluster import RankGroup
from galvatron_lite.parallelism.base import Collective, Communication, Moment, Strategy
from galvatron_lite.plans.schema import Schedule

NAME = "pipeline"


def boundary_bytes(output_bytes: int, microbatch: int, sender: Strategy) -> int:
    """Bytes of the boundary tensor that one device of the sending stage holds, for one micro-batch.

    Args:
        output_bytes: bytes per sample of the last layer's output.
        microbatch: samples of one micro-batch over the whole stage.
        sender: strategy of the last layer of the sending stage.
    """
    tokens = sender.tensor if sender.sequence_parallel else 1
    return -(-output_bytes * microbatch // (sender.batch_degree * tokens))


def transfer(size: int, stage_devices: int) -> Communication:
    """One device's send to the device of equal place in the next stage, while all its neighbours do the same."""
    group = RankGroup(2, stage_devices, stage_devices)
    return Communication(Collective.SEND_RECV, size, group, Moment.FORWARD, overlaps=False, cause=NAME)


def in_flight(schedule: Schedule, stages: int, stage: int, microbatches: int) -> int:
    """The most micro-batches whose activations a stage holds at once.

    1F1B: the stage may run ahead of its own backward by the stages that follow it (Narayanan et al. 2021). GPipe: all.
    """
    return microbatches if schedule is Schedule.GPIPE else min(microbatches, stages - stage)


def buffer_bytes(left: int, right: int) -> int:
    """Bytes of send and receive buffers of one stage, beyond what its layers keep.

    Coming in: one activation received ahead of its pass and one gradient on its way back (``left`` bytes each, 0 in
    the first stage). Going out: one activation under way and one gradient received (``right``, 0 in the last). The
    inputs of micro-batches in flight are part of what the first layer keeps.
    """
    return 2 * (left + right)
