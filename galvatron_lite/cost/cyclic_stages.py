"""Figures of the stages of cyclic data parallelism, and the split into stages of equal time. No torch here.

Every pass runs on one device, so layers are priced whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from galvatron_lite.cost.layer import ALONE, LayerCost, LayerPricer
from galvatron_lite.cost.memory import terms, worst_moment
from galvatron_lite.cost.sharing import sharing_of, tied_groups
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.parallelism.cyclic.simulation import equal_cuts
from galvatron_lite.parallelism.strategy import Strategy

WHOLE = Strategy()
"""What every layer does: all of it on one device."""


@dataclass(frozen=True, slots=True)
class StageFigures:
    """What one stage costs one device."""

    forward: float  # forward, backward: seconds of compute of a micro-batch; backward without ``recompute``
    backward: float
    recompute: float  # seconds of computing again
    host: float  # seconds of fixed host work a micro-batch, half in either pass
    update: float  # seconds of the optimizer
    update_host: float  # seconds of fixed host work an update
    parameters: int  # bytes of one version, buffers included
    gradients: int  # bytes of its gradients
    states: int  # bytes of optimizer states
    kept: int  # bytes from forward to backward, a micro-batch
    ahead: int  # bytes live at the worst moment of forward, beyond parameters and what other stages keep
    back: int  # the same of backward, its own gradients among them
    updating: int  # temporary bytes of the optimizer
    entering: int  # entering, leaving: bytes of the tensors that cross its two boundaries, a micro-batch
    leaving: int
    copied: int  # bytes of a micro-batch that it keeps of tensors made before it, where it runs on devices of its own


def stage_figures(pricer: LayerPricer, cuts: Sequence[int], microbatch: int) -> list[StageFigures]:
    """Figures of all stages.

    Args:
        pricer: of the profile.
        cuts: places where stages begin, and the number of layers.
        microbatch: samples.

    Raises:
        InputError: the profile holds no point of a whole layer, or layers of two stages share parameters.
    """
    graph = pricer.profile.graph
    check_shared(graph, cuts)
    layers = layer_costs(pricer, microbatch)
    return [
        _figures(graph, range(start, stop), layers[start:stop], microbatch, pricer.profile.overhead.microbatch)
        for start, stop in pairwise(cuts)
    ]


def layer_costs(pricer: LayerPricer, microbatch: int) -> list[LayerCost]:
    """Cost of every layer, whole on one device.

    Raises:
        InputError: the profile holds no point of one.
    """
    graph, costs = pricer.profile.graph, list[LayerCost]()
    shared = sharing_of(graph, range(len(graph.layers)))
    for place, layer in enumerate(graph.layers):
        cost = pricer.price(layer.kind, WHOLE, microbatch, 1, shared.get(place, ALONE))
        if cost is None:
            raise InputError(f"strategy of {layer.name}", str(WHOLE), "The profile has no figures of it whole.")
        costs.append(cost)
    return costs


def split(pricer: LayerPricer, stages: int, microbatch: int) -> tuple[int, ...]:
    """Stages of equal time, forward and backward: where they begin, and the number of layers; empty where the model
    has too few layers that can be apart.

    Raises:
        InputError: the profile holds no point of a whole layer.
    """
    graph = pricer.profile.graph
    if graph.whole and stages > 1:
        return ()
    costs = layer_costs(pricer, microbatch)
    return equal_cuts([cost.forward_seconds + cost.backward_seconds for cost in costs], stages, _joined(graph))


def check_shared(graph: ModelGraph, cuts: Sequence[int]) -> None:
    """Raise InputError where layers of two stages share parameters: versions of one would be of two times."""
    for run in _joined(graph):
        cut = next((cut for cut in cuts if run.start < cut < run.stop), None)
        if cut is not None:
            first, last = graph.layers[run.start].name, graph.layers[run.stop - 1].name
            remedy = f"A stage may not begin at {graph.layers[cut].name}: {first} and {last} share parameters."
            raise InputError("stages", "cyclic", remedy)


def _joined(graph: ModelGraph) -> list[range]:
    """Layers that share parameters, and those between them."""
    return [range(group[0], group[-1] + 1) for group in tied_groups(graph)]


def _figures(
    graph: ModelGraph, inside: range, costs: Sequence[LayerCost], microbatch: int, fixed: float
) -> StageFigures:
    resting = sum(cost.parameters + cost.states for cost in costs)
    backward = worst_moment([terms(cost, 1, 1) for cost in costs], optimizer=False).size - resting
    before, ahead = 0, 0
    for cost in costs:
        ahead = max(ahead, before + max(cost.forward_working, cost.kept))
        before += cost.kept
    return StageFigures(
        forward=sum(cost.forward + cost.forward_exposed for cost in costs),
        backward=sum(cost.backward + cost.backward_exposed for cost in costs),
        recompute=sum(cost.recompute for cost in costs),
        host=sum(cost.host for cost in costs) + fixed,
        update=sum(cost.update + cost.step_exposed for cost in costs),
        update_host=sum(cost.step_host for cost in costs),
        parameters=sum(cost.parameters for cost in costs),
        gradients=sum(cost.gradients + cost.formed_gradients + cost.passing_gradients for cost in costs),
        states=sum(cost.states for cost in costs),
        kept=before,
        ahead=ahead,
        back=int(backward),
        updating=sum(cost.updating for cost in costs),
        entering=graph.crossing(inside.start) * microbatch if inside.start else 0,
        leaving=graph.crossing(inside.stop) * microbatch if inside.stop < len(graph.layers) else 0,
        copied=graph.borrowed(inside) * microbatch,
    )
