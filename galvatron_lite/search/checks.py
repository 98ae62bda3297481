"""What is said where the request itself leaves no plan, before any cost is looked at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.layout import layout
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, ModelGraph, Role
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.registry import REFUSING, choosing
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.search.pins import typed_name
from galvatron_lite.search.problem import is_glued
from galvatron_lite.search.shapes import Request, shapes_of
from galvatron_lite.search.space import Fixed, microbatch_counts
from galvatron_lite.search.tables import Glue, glue_of

_PIXELS, _CHANNELS = ("depth", "height", "width"), ("filters", "channels")
_BESIDE = ("tensor", "context", "expert")
"""What no layer has beside shared pixels, filters or channels."""


def check_layers(request: Request) -> None:
    """Raise InputError where a layer cannot be split as it is pinned; names it, the reason, and what it offers."""
    for layer in request.graph.layers:
        pins = dict(request.fixed.at_layer(layer.name).strategy)
        for field, value in pins.items():
            _check_degree(request, layer, field, value)
        _check_together(layer, pins)
        if request.fixed.pins_of(layer.name) and not _offered(request, layer):
            raise _unoffered(request, layer, pins)


def _check_degree(request: Request, layer: Layer, field: str, value: object) -> None:
    own = {one.degree: one for one in REFUSING}
    if field not in own or not isinstance(value, int) or value <= 1:
        return
    kind = request.graph.kind_of(layer)
    why = own[field].refusal(kind, value)
    if why:
        offered = [str(choice[field]) for choice in own[field].choices(kind, request.devices)]
        remedy = f"{why[0].upper()}{why[1:]}. It offers {', '.join(offered)}; or pin other layers by name."
        raise InputError(f"--fix {layer.name}.{field}", value, remedy)


def _check_together(layer: Layer, pins: Mapping[str, object]) -> None:
    used = [field for field, value in pins.items() if field in (*_PIXELS, *_CHANNELS, *_BESIDE) and value not in (1,)]
    ways = {"pixels" if field in _PIXELS else field for field in used if field not in _BESIDE}
    beside = [field for field in used if field in _BESIDE]
    if len(ways) + len(beside) <= 1 or not ways:
        return
    remedy = "A layer has one of pixels (depth, height, width), filters and channels; lift all but one."
    if len(ways) == 1:
        remedy = f"A layer that shares pixels, filters or channels has no {' or '.join(beside)} beside it; lift one."
    raise InputError(_fix_options(layer, used), ", ".join(str(pins[field]) for field in used), remedy)


def _offered(request: Request, layer: Layer, without: str = "") -> list[Strategy]:
    """What a layer may do on the stages of any pipeline under all that is pinned for it, but for one field."""
    fixed = request.fixed.at_layer(layer.name)
    if without:
        fixed = replace(fixed, strategy=tuple(pin for pin in fixed.strategy if pin[0] != without))
    sizes = [request.devices // stages for stages in request.pipelines]
    return [one for size in sizes for one in request.space.strategies(layer.kind, size, fixed)]


def _unoffered(request: Request, layer: Layer, pins: Mapping[str, object]) -> InputError:
    """That a layer has each of its pins, but not all of them; with what it offers of the one that was said last."""
    rest = [(field, {getattr(one, field) for one in _offered(request, layer, field)}) for field in [*pins][::-1]]
    ways = [f"{field} {', '.join(sorted(map(_value, own)))}" for field, own in rest if own]
    where = (
        f"on {request.devices} devices" if request.pipelines == (1,) else f"on any stage of {request.devices} devices"
    )
    remedy = f"No strategy of {layer.name} {where} has all that is pinned for it; "
    remedy += f"beside the other pins it offers {' or '.join(ways)}." if ways else "lift some of the pins."
    return InputError(_fix_options(layer, list(pins)), ", ".join(_value(value) for value in pins.values()), remedy)


def _value(value: object) -> str:
    return str(getattr(value, "value", value))


def _fix_options(layer: Layer, fields: Sequence[str]) -> str:
    return " ".join(f"--fix {layer.name}.{typed_name(field)}" for field in fields)


def _taken(request: Request, layer: Layer, devices: int) -> tuple[Strategy, ...]:
    return request.space.strategies(layer.kind, devices, request.fixed.at_layer(layer.name))


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
    return ", ".join([*plain][:4]) + (", ..." if len(plain) > 4 else "") or "nothing with what is pinned"


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
        raise _nothing_left(request)
    step = min(unit * (request.fixed.microbatches or 1) for unit in units)
    below = request.global_batch // step * step
    offered = " or ".join(str(batch) for batch in (below, below + step) if batch)
    raise InputError(
        "--batch", request.global_batch, f"It cannot be shared among {request.devices} devices; the nearest: {offered}."
    )


def _nothing_left(request: Request) -> InputError:
    """That some layers have no strategy with all that is pinned; names a few, and why the first cannot."""
    sizes = [request.devices // stages for stages in request.pipelines]
    unable = [one for one in request.graph.layers if not any(_degrees(request, one, size) for size in sizes)]
    names = ", ".join(one.name for one in unable[:3]) + (", ..." if len(unable) > 3 else "")
    kind = request.graph.kinds[unable[0].kind] if unable else None
    reasons = [] if kind is None else [reason for one in choosing() if (reason := one.reason(kind))]
    pins = " ".join(f"{typed_name(name)}={_value(value)}" for name, value in request.fixed.pinned) or "nothing"
    remedy = f"On {request.devices} devices nothing is left for {names or 'the layers'}; lift one of the pins."
    return InputError("--fix", pins, " ".join([remedy, *reasons[:2]]))


def _units(request: Request) -> Iterator[int]:
    """Per pipeline degree, the least number of samples of a micro-batch that every layer can be split for."""
    for stages in request.pipelines:
        degrees = [_degrees(request, layer, request.devices // stages) for layer in _unlike(request)]
        if all(degrees):
            # Every kind needs one of its degrees to divide the unit: try the divisors of the stage, smallest first.
            whole = divisors(request.devices // stages)
            yield next(u for u in whole if all(any(u % d == 0 for d in options) for options in degrees))


def _kinds(request: Request) -> set[str]:
    return {layer.kind for layer in request.graph.layers}


def _unlike(request: Request) -> list[Layer]:
    return [*{(one.kind, request.fixed.pins_of(one.name)): one for one in request.graph.layers}.values()]


def _degrees(request: Request, layer: Layer, devices: int) -> set[int]:
    return {strategy.batch_degree for strategy in _taken(request, layer, devices)}


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
    return str(Strategy(tensor=strategy.tensor, sequence_parallel=strategy.sequence_parallel,
                        recompute=strategy.recompute, filters=strategy.filters,
                        channels=strategy.channels))  # fmt: skip


def skipping(graph: ModelGraph) -> tuple[str, ...]:
    """What the space leaves out where tensors of the model skip layers; empty where none does."""
    places = {layer.name: place for place, layer in enumerate(graph.layers)}
    sent = [own for own in graph.tensors if own.size]  # the batch itself every stage has
    far = [own for own in sent if max(places[name] for name in own.readers) > places[own.producer] + 1]
    if not far:
        return ()
    return (
        f"Tensors that skip layers ({len(far)}, the first made by {far[0].producer}) go from stage to stage up to the "
        "one that reads them; sends past the stages between are not searched.",
    )
