"""What is said where the request itself leaves no plan, before any cost is looked at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.layout import layout
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, ModelGraph, Role
from galvatron_lite.parallelism.base import Strategy
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.registry import REFUSING
from galvatron_lite.search.problem import is_glued
from galvatron_lite.search.shapes import Request, shapes_of
from galvatron_lite.search.space import Fixed, microbatch_counts
from galvatron_lite.search.tables import Glue, glue_of


def check_layers(request: Request) -> None:
    """Raise InputError where a layer cannot be split as it is pinned; names it, the reason, and what it offers."""
    graph, fixed = request.graph, request.fixed
    own = {one.degree: one for one in REFUSING}
    for layer in graph.layers:
        kind = graph.kind_of(layer)
        for field, value in (*fixed.strategy, *fixed.pins_of(layer.name)):
            if field not in own or not isinstance(value, int) or value <= 1:
                continue
            why = own[field].refusal(kind, value)
            if why:
                offered = [str(choice[field]) for choice in own[field].choices(kind, request.devices)]
                remedy = f"{why[0].upper()}{why[1:]}. It offers {', '.join(offered)}; or pin other layers by name."
                raise InputError(f"--fix {layer.name}.{field}", value, remedy)
        pins = {field: value for field, value in (*fixed.strategy, *fixed.pins_of(layer.name)) if field in own}
        if len(pins) > 1 and not any(_taken(request, layer, request.devices // stages) for stages in request.pipelines):
            remedy = f"Over {request.devices} devices it can have each, but not all of them; lift one."
            said = " ".join(f"--fix {layer.name}.{field}" for field in pins)
            raise InputError(said, ", ".join(str(value) for value in pins.values()), remedy)


def _taken(request: Request, layer: Layer, devices: int) -> list[Strategy]:
    """What a layer may do on a stage of so many devices under all that is pinned for it."""
    every = request.space.strategies(layer.kind, devices, request.fixed)
    return [one for one in every if request.fixed.allows_in(layer.name, one)]


def unglued(request: Request) -> str:
    """That the layers before and after the blocks have no layout in common, as those of one stage must; empty where
    they have, or where there are several stages."""
    graph, offered = request.graph, dict[str, dict[Glue, Strategy]]()
    for layer in graph.layers if 1 in request.pipelines and is_glued(graph) else ():
        if layer.role is not Role.BLOCK:
            taken = _taken(request, layer, request.devices)
            offered[layer.name] = {glue_of(layout(one)): one for one in reversed(taken)}
    if len(offered) <= 1 or set.intersection(*({*own} for own in offered.values())):
        return ""
    said = "; ".join(f"{name}: {_few(own.values())}" for name, own in offered.items())
    return f"Layers before and after the blocks of a stage split samples, pixels and channels alike, but offer {said}."


def _few(strategies: Iterable[Strategy]) -> str:
    """Names of a few, recomputation and ZeRO left out."""
    plain = dict.fromkeys(str(replace(one, zero=1, zero_stage=0, data=one.batch_degree)) for one in strategies)
    return ", ".join([*plain][:4]) + (", ..." if len(plain) > 4 else "")


def check_batch(request: Request) -> None:
    """Raise InputError where no way to split the layers divides the batch; names the nearest batches that do.

    A layer with strategies of batch degrees D can work on a micro-batch that some degree of D divides; a batch will do
    where one pipeline degree and one micro-batch count suit every layer.
    """
    counts = microbatch_counts(request.global_batch, request.fixed)
    units = []
    for unit in _units(request):
        if any(request.global_batch // count % unit == 0 for count in counts):
            return
        units.append(unit)
    if not units:
        raise InputError(
            "fixed", dict(request.fixed.strategy), f"No layer can be split that way over {request.devices} devices."
        )
    step = min(unit * (request.fixed.microbatches or 1) for unit in units)
    below = request.global_batch // step * step
    offered = " or ".join(str(batch) for batch in (below, below + step) if batch)
    raise InputError(
        "--batch", request.global_batch, f"It cannot be shared among {request.devices} devices; the nearest: {offered}."
    )


def _units(request: Request) -> Iterator[int]:
    """Per pipeline degree, the least number of samples of a micro-batch that every layer can be split for."""
    for stages in request.pipelines:
        degrees = [_degrees(request, name, request.devices // stages) for name in sorted(_kinds(request))]
        if all(degrees):
            # Every kind needs one of its degrees to divide the unit: try the divisors of the stage, smallest first.
            whole = divisors(request.devices // stages)
            yield next(u for u in whole if all(any(u % d == 0 for d in options) for options in degrees))


def _kinds(request: Request) -> set[str]:
    return {layer.kind for layer in request.graph.layers}


def _degrees(request: Request, kind: str, devices: int) -> set[int]:
    return {strategy.batch_degree for strategy in request.space.strategies(kind, devices, request.fixed)}


def unprofiled(request: Request, pricer: LayerPricer) -> tuple[str, ...]:
    """Strategies left out because the profile has no figures for them, a line for each kind of layer."""
    lines = []
    sizes = _widest({shape.stage_devices for shape in shapes_of(request)}, request.space.node_devices)
    for name in sorted(_kinds(request)):
        options = {s for size in sizes for s in request.space.strategies(name, size, Fixed())}
        missing = {_work(strategy) for strategy in options if not pricer.covers(name, strategy)}
        if missing:
            lines.append(f"profile: {name}: no figures for {', '.join(sorted(missing))}")
    return tuple(lines)


def _widest(sizes: set[int], node: int) -> list[int]:
    """Stages on which layers have all the work that they have on any of some sizes.

    What a device does can also be done on a multiple of the devices, which take more samples; groups that must lie
    within a node do there too, unless the smaller stage is within a node that its devices do not divide.
    """
    return [
        size
        for size in sorted(sizes)
        if not any(
            more > size and more % size == 0 and (more <= node or size > node or node % size == 0) for more in sizes
        )
    ]


def _work(strategy: Strategy) -> str:
    """What of a strategy the profile must cover."""
    return str(Strategy(tensor=strategy.tensor, sequence_parallel=strategy.sequence_parallel,
                        recompute=strategy.recompute, filters=strategy.filters,
                        channels=strategy.channels))  # fmt: skip


def skipping(graph: ModelGraph) -> tuple[str, ...]:
    """What the space leaves out where tensors of the model skip layers; empty where none does."""
    places = {layer.name: place for place, layer in enumerate(graph.layers)}
    far = [own for own in graph.tensors if max(places[name] for name in own.readers) > places[own.producer] + 1]
    if not far:
        return ()
    return (
        f"Tensors that skip layers ({len(far)}, the first made by {far[0].producer}) go from stage to stage up to the "
        "one that reads them; sends past the stages between are not searched.",
    )
