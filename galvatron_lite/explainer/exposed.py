"""Which communication of a layer delays it, and which runs behind compute, by cause.

``cost.overlap`` says what all communication of a layer adds to its compute. Here the same seconds are told apart:
blocking communication by its cause; what the overlap leaves exposed in proportion to the seconds of each that might
have been hidden, as nothing says which of those that run together waits for which.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from galvatron_lite.cost.communication import together
from galvatron_lite.cost.layer import LayerCost, LayerPricer
from galvatron_lite.cost.overlap import GATHER, hidden_share, moment_of
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.parallelism.strategy import Strategy

FORWARD, BACKWARD, STEP = Moment.FORWARD.value, Moment.BACKWARD.value, Moment.STEP.value


@dataclass(frozen=True, slots=True)
class Caused:
    """Seconds of one layer's communication of one cause.

    Attributes:
        microbatch: exposed, every micro-batch, both passes.
        step: exposed, once a step.
        microbatch_all, step_all: exposed or not.
    """

    microbatch: float = 0.0
    step: float = 0.0
    microbatch_all: float = 0.0
    step_all: float = 0.0


def caused_by(
    pricer: LayerPricer, kind: str, strategy: Strategy, microbatch: int, cost: LayerCost
) -> dict[str, Caused]:
    """Communication of a layer by cause: what the dimensions say. Copies to host memory and shared parameters are left
    out.

    Args:
        pricer: of the layer's devices.
        kind: of layer.
        strategy: of it.
        microbatch: samples of one over the stage.
        cost: the layer's.
    """
    sent = pricer.work(pricer.profile.graph.kinds[kind], strategy, microbatch).communications
    timed = [(one, float(seconds)) for one, seconds in zip(sent, pricer.links.timed(sent), strict=True)]
    exposed = _exposed(timed, cost.forward, cost.backward + cost.recompute, pricer)
    whole: dict[tuple[str, bool], float] = defaultdict(float)
    for one, seconds in timed:
        whole[one.cause, one.moment is Moment.STEP] += seconds
    return {
        cause: Caused(exposed[cause, False], exposed[cause, True], whole[cause, False], whole[cause, True])
        for cause in dict.fromkeys(one.cause for one in sent)
    }


def _exposed(
    timed: Sequence[tuple[Communication, float]], forward: float, backward: float, pricer: LayerPricer
) -> Mapping[tuple[str, bool], float]:
    """Exposed seconds by (cause, whether once a step)."""
    hidden, overlap = pricer.profile.hidden, pricer.profile.overlap
    found: dict[tuple[str, bool], float] = defaultdict(float)
    hiding: dict[str, dict[str, float]] = {moment: defaultdict(float) for moment in (FORWARD, BACKWARD, STEP, GATHER)}
    for one, seconds in timed:
        share, moment = hidden_share(one, hidden), moment_of(one)
        hiding[moment][one.cause] += share * seconds
        found[one.cause, moment in (STEP, GATHER)] += (1.0 - share) * seconds
    sums = {moment: sum(by_cause.values()) for moment, by_cause in hiding.items()}
    ahead = together(forward, sums[FORWARD], overlap)
    back = together(backward, sums[BACKWARD], overlap)
    added = {
        FORWARD: ahead - forward,
        BACKWARD: back - backward,
        STEP: together(backward, sums[BACKWARD] + sums[STEP], overlap) - back,
        GATHER: together(forward, sums[FORWARD] + sums[GATHER], overlap) - ahead,
    }
    for moment, by_cause in hiding.items():
        for cause, seconds in by_cause.items():
            if sums[moment]:
                found[cause, moment in (STEP, GATHER)] += float(added[moment]) * seconds / sums[moment]
    return found
