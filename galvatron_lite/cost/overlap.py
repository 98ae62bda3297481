"""Which communication compute hides, and what is left exposed. No torch here.

A communication of S seconds with cause c has a share h_c that may run beside compute and 1 - h_c that blocks it. h_c
is 1 for what a dimension says overlaps (gradients of replicas, ZeRO's gathers and reductions) and 0 for the rest
(tensor and sequence parallelism, redistribution), unless the profile names it (``Profile.hidden``). With c_f and c_b
the layer's compute in forward and backward, H_f, H_b, H_s, H_g the seconds that may hide in forward, in backward, in
the last backward of a step and in its first forward, and t(c, H) the seconds until both are done
(``communication.together``):

    forward  = t(c_f, H_f) - c_f + blocking_f        every micro-batch
    backward = t(c_b, H_b) - c_b + blocking_b        every micro-batch
    step     = t(c_b, H_b + H_s) - t(c_b, H_b) + t(c_f, H_f + H_g) - t(c_f, H_f) + blocking_s

- Gradients of replicas (``step``) hide behind the last micro-batch's backward only. A layer's own backward stands for
  the one of the layers before it that runs while its bucket is reduced: among equal layers that is the same, and the
  layer without compute, the embedding, whose bucket goes last, stays exposed: the tail.
- Parameters gathered after the update (all-gathers once a step: ZeRO-1, a distributed optimizer) hide behind the first
  micro-batch's forward (``zero.gather``).
- ZeRO-3's gather of layer l+1 hides behind layer l in either pass; the first layer's has nothing before it, and again
  the embedding's own compute, close to none, stands for that.
- Blocking communication counts in full where the device waits for the host too: each rank waits for the slowest host
  of its group first. vTrain's launch-bound runs (arXiv 2312.12391) grow with the message as others do.

Li et al. 2020 (arXiv:2006.15704, section 3.2) for buckets, Zhao et al. 2023 (arXiv:2304.11277, section 3.3) for
prefetching; the mutual slow-down after Miao et al. 2022 (Galvatron, arXiv:2211.13878, section 3.4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from galvatron_lite.arrays import Real
from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.cost.communication import together
from galvatron_lite.cost.points import LayerFigures
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.profiler.schema import Overlap

GATHER = "gather"
"""Moment of an all-gather once a step, in the keys of ``Profile.hidden``: it follows the update."""


@dataclass(frozen=True, slots=True)
class ExposedCommunication:
    """Seconds of one layer's communication that compute does not hide; arrays under several strategies."""

    forward: Real  # forward, backward: every micro-batch
    backward: Real
    step: Real  # once a step


def moment_of(communication: Communication) -> str:
    """When a communication runs: forward, backward, step, or gather (parameters after the update)."""
    once = communication.moment is Moment.STEP
    return GATHER if once and communication.collective is Collective.ALL_GATHER else communication.moment.value


def hidden_share(communication: Communication, hidden: Mapping[str, float]) -> float:
    """Share of a communication that compute may hide: by cause and moment, by cause, else as its dimension says."""
    default = 1.0 if communication.overlaps else 0.0
    by_cause = hidden.get(communication.cause, default)
    return hidden.get(f"{communication.cause}.{moment_of(communication)}", by_cause)


def exposed_by(
    communications: Sequence[tuple[Communication, Real]],
    figures: LayerFigures,
    hidden: Mapping[str, float],
    overlap: Overlap,
) -> ExposedCommunication:
    """What one layer's communication adds to its compute; see the module.

    Args:
        communications: each with its seconds alone on the device.
        figures: the layer's compute seconds.
        hidden: shares by cause.
        overlap: mutual slow-down.
    """
    blocking: dict[str, Real] = dict.fromkeys((*(moment.value for moment in Moment), GATHER), 0.0)
    hiding = dict(blocking)
    for communication, seconds in communications:
        share, moment = hidden_share(communication, hidden), moment_of(communication)
        if share:
            hiding[moment] = hiding[moment] + share * seconds
        if share < 1:
            blocking[moment] = blocking[moment] + (1.0 - share) * seconds
    forward, backward = figures.forward, figures.backward
    ahead = together(forward, hiding["forward"], overlap)
    back = together(backward, hiding["backward"], overlap)
    last = together(backward, hiding["backward"] + hiding["step"], overlap)
    first = together(forward, hiding["forward"] + hiding[GATHER], overlap)
    return ExposedCommunication(
        ahead - forward + blocking["forward"],
        back - backward + blocking["backward"],
        last - back + first - ahead + blocking["step"] + blocking[GATHER],
    )
