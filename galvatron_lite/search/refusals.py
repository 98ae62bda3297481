"""What is said where a request leaves no plan: before any cost is looked at, and where nothing fits the memory.

Where nothing fits, the error names the least memory that a plan needs, and what alone would make one fit. A search that
ends with the first plan it meets answers whether anything fits a budget; the smallest budget is found by halving the
range between one that no plan fits and what a plan needs. Exact for models of few layers; for others searches end at
3 % from one that fits, or after some work, and the error says that the budget is the least found. Where devices of
several types have budgets of their own, memory counts as a share of them. Pins to lift, dimensions to allow again,
other backends and more devices are searched, not guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from galvatron_lite.cluster.budget import Budget, as_budget, bytes_on
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.model.graph import Layer, ModelGraph, Role
from galvatron_lite.parallelism.backends import ANY, backend_named
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.layout import layout_of
from galvatron_lite.parallelism.registry import REFUSING, choosing
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.best_first import ANY_TIME, QUICK, finished, plain, search
from galvatron_lite.search.pin_names import typed_name
from galvatron_lite.search.problem import is_glued
from galvatron_lite.search.result import summary
from galvatron_lite.search.shapes import Request, Session
from galvatron_lite.search.space import Fixed, microbatch_counts
from galvatron_lite.search.tables import Glue, glue_of
from galvatron_lite.units import format_budget


def check_layers(request: Request) -> None:
    """Raise InputError where a layer cannot be split as it is pinned; names it, the reason, and what it offers."""
    refusing = {one.degree: one for one in REFUSING}
    for layer in request.graph.layers:
        pins, kind = dict(request.fixed.at_layer(layer.name).strategy), request.graph.kind_of(layer)
        for name, value in pins.items():
            if name not in refusing or not isinstance(value, int) or value <= 1:
                continue
            why = refusing[name].refusal(kind, value)
            if why:
                offered = ", ".join(str(choice[name]) for choice in refusing[name].choices(kind, request.devices))
                remedy = f"{why[0].upper()}{why[1:]}. It offers {offered}; or pin other layers by name."
                raise InputError(f"--fix {layer.name}.{name}", value, remedy)
        if request.fixed.pins_of(layer.name) and not request.offered(layer):
            raise _unoffered(request, layer, pins)


def _unoffered(request: Request, layer: Layer, pins: dict[str, object]) -> InputError:
    """That a layer has each of its pins, but not all of them; with what it offers of the one that was said last."""
    fixed, ways = request.fixed.at_layer(layer.name), []
    for field in reversed(pins):
        others = replace(fixed, strategy=tuple(pin for pin in fixed.strategy if pin[0] != field))
        values = {_value(getattr(strategy, field)) for strategy in request.offered(layer, others)}
        ways += [f"{field} {', '.join(sorted(values))}"] if values else []
    stage = "" if request.pipelines == (1,) else "any stage of "
    remedy = f"No strategy of {layer.name} on {stage}{request.devices} devices has all that is pinned for it; "
    remedy += f"beside the other pins it offers {' or '.join(ways)}." if ways else "lift some of the pins."
    options = " ".join(f"--fix {layer.name}.{typed_name(field)}" for field in pins)
    return InputError(options, ", ".join(map(_value, pins.values())), remedy)


def _value(value: object) -> str:
    return str(getattr(value, "value", value))


def _taken(request: Request, layer: Layer, devices: int) -> tuple[Strategy, ...]:
    return request.space.strategies(layer.kind, devices, request.fixed.at_layer(layer.name))


def _unglued(request: Request) -> str:
    """That the layers before and after the blocks have no layout in common, as those of one stage must; empty where
    they have, or where there are several stages."""
    graph, offered = request.graph, dict[str, dict[Glue, Strategy]]()
    for layer in graph.layers if 1 in request.pipelines and is_glued(graph) else ():
        if layer.role is not Role.BLOCK:
            taken = _taken(request, layer, request.devices)
            offered[layer.name] = {glue_of(layout_of(one)): one for one in reversed(taken)}
    if len(offered) <= 1 or set.intersection(*({*strategies} for strategies in offered.values())):
        return ""
    texts = []
    for name, strategies in offered.items():  # a few, recomputation and ZeRO left out
        plain = dict.fromkeys(
            str(replace(one, zero=1, zero_stage=0, data=one.batch_degree)) for one in strategies.values()
        )
        some = ", ".join([*plain][:4]) + (", ..." if len(plain) > 4 else "")
        texts.append(f"{name}: {some or 'nothing with what is pinned'}")
    return (
        "Layers before and after the blocks of a stage split samples, pixels and channels alike, but offer "
        f"{'; '.join(texts)}."
    )


def check_batch(request: Request) -> None:
    """Raise InputError where no way to split the layers divides the batch; names the nearest batches that do.

    A layer with strategies of batch degrees D can work on a micro-batch that some degree of D divides; a batch will do
    where one pipeline degree and one micro-batch count suit every layer.
    """
    counts = microbatch_counts(request.global_batch, request.fixed)
    unlike = {(layer.kind, request.fixed.pins_of(layer.name)): layer for layer in request.graph.layers}
    units, unable = [], dict[str, None]()
    for stages in request.pipelines:
        size = request.devices // stages
        degrees = {
            one.name: {degrees_of.batch_degree for degrees_of in _taken(request, one, size)} for one in unlike.values()
        }
        if not all(degrees.values()):
            unable |= dict.fromkeys(name for name, degree in degrees.items() if not degree)
            continue
        # every kind needs one of its degrees to divide the unit: the least divisor of the stage for which that holds
        unit = next(u for u in divisors(size) if all(any(u % d == 0 for d in degree) for degree in degrees.values()))
        if any(request.global_batch // count % unit == 0 for count in counts):
            return
        units.append(unit)
    if not units:
        kinds = [request.graph.kind_of(one) for one in unlike.values() if one.name in unable]
        reasons = [reason for one in choosing() if kinds and (reason := one.reason(kinds[0]))]
        names = ", ".join([*unable][:3]) + (", ..." if len(unable) > 3 else "")
        pins = " ".join(f"{typed_name(name)}={_value(value)}" for name, value in request.fixed.pinned) or "nothing"
        remedy = f"On {request.devices} devices nothing is left for {names or 'the layers'}; lift one of the pins."
        raise InputError("--fix", pins, " ".join([remedy, *reasons[:2]]))
    step = min(unit * (request.fixed.microbatches or 1) for unit in units)
    below = request.global_batch // step * step
    offered = " or ".join(str(batch) for batch in (below, below + step) if batch)
    raise InputError(
        "--batch", request.global_batch, f"It cannot be shared among {request.devices} devices; the nearest: {offered}."
    )


def unprofiled(request: Request, pricer: LayerPricer) -> tuple[str, ...]:
    """Strategies left out because the profile has no figures for them, a line for each kind of layer.

    What a device does can also be done on a multiple of the devices, so that the largest stages are looked at; groups
    that must lie within a node do there too, unless the smaller stage is within a node that its devices do not divide.
    """
    node, lines = request.space.node_devices, []
    sizes = {request.devices // stages for stages in request.pipelines}
    inside = {size for size in sizes if size <= node and node % size}
    widest = [
        size for size in sizes
        if not any(more > size and more % size == 0 and (more <= node or size not in inside) for more in sizes)
    ]  # fmt: skip
    for name in sorted({layer.kind for layer in request.graph.layers}):
        options = {s for size in widest for s in request.space.strategies(name, size, Fixed())}
        missing = {str(pricer.worked(strategy)) for strategy in options if not pricer.covers(name, strategy)}
        if missing:
            lines.append(f"profile: {name}: no figures for {', '.join(sorted(missing))}")
    return tuple(lines)


def skipping(graph: ModelGraph) -> tuple[str, ...]:
    """What the space leaves out where tensors of the model skip layers; empty where none does."""
    places = {layer.name: place for place, layer in enumerate(graph.layers)}
    sent = [tensor for tensor in graph.tensors if tensor.size]  # the batch itself every stage has
    far = [own for own in sent if max(places[name] for name in own.readers) > places[own.producer] + 1]
    if not far:
        return ()
    return (
        f"Tensors that skip layers ({len(far)}, the first made by {far[0].producer}) go from stage to stage up to the "
        "one that reads them; sends past the stages between are not searched.",
    )


_EXACT_LAYERS = 8
_SLACK = 0.03
"""Share of its memory within which the search for a leaner plan of a model with more layers ends."""
_BOUNDLESS = 2**60
_EFFORT, _FIRST = 150_000_000, 300_000
"""Labels, by layers, after which a search gives up as if nothing fitted, and of one for what alone would make a plan
fit."""


def infeasible(request: Request, pricer: LayerPricer, means: str = "") -> InfeasibleError:
    """The error for a budget that is too small: the smallest that fits, by which means, and what would have to give."""
    slack = 0.0 if len(request.graph.layers) <= _EXACT_LAYERS else _SLACK
    least = least_budget(request, pricer, slack)
    if least is None:
        return InfeasibleError(
            f"No plan of {request.graph.name} exists on {request.devices} devices with a batch of "
            f"{request.global_batch}: no way to split its layers divides the batch and has figures in the profile. "
            + (_unglued(request) or "Give another batch, other devices, or profile more tensor degrees.")
        )
    share, budget = 1.0 - request.margin, as_budget(request.budget)
    before = budget.scaled(1.0 / share).plus(1) if request.margin else budget
    shares = " and ".join(f"{format_budget(size)} ({name})" for name, size in before.by_device)
    smallest, about = ceil(least.most / share), "about " * bool(slack)
    if budget.by_device:
        needs = [(name, ceil(size / share)) for name, size in least.by_device]
        parts = " and ".join(f"{format_budget(size, up=True)} ({name})" for name, size in needs)
        needed = f"the smallest budgets, in about the proportion of those given, are {about}{parts}"
    else:
        needed = f"the smallest budget is {about}{format_budget(smallest, up=True)}"
    context = max(group.device.context for group in pricer.profile.cluster.groups)
    remedy = f"Use more devices (--fewest says how many){' or a shorter sequence' * (request.graph.sequence > 1)}."
    if 2 * context > smallest:
        remedy = f"{format_budget(context)} of it are the driver's on each device, under any plan."
    return InfeasibleError(
        f"--mem {shares or format_budget(bytes_on(before, ''))}: no plan of {request.graph.name} fits on "
        f"{request.devices} device{'s' * (request.devices > 1)}; {needed}{means}. {remedy}",
        smallest,
    )


def least_budget(request: Request, pricer: LayerPricer, slack: float = 0.0) -> Budget | None:
    """The least memory that a plan of the space fits, in the proportion of the budget asked for; None where the space
    is empty.

    Args:
        request: what is asked for; of its budget only the proportion between types of devices matters.
        pricer: prices layers.
        slack: 0.0: no plan needs less; else the search ends where nothing is met below ``1 - slack`` of the memory.
    """
    asked = as_budget(request.budget)
    unit = asked.scaled(1.0) if asked.by_device else Budget(1)
    exact = _EFFORT // len(request.graph.layers)

    def fitting(budget: Budget, effort: int = exact) -> Budget | None:
        wanted = replace(request, budget=budget if asked.by_device else budget.least)
        result = search(wanted, pricer, slack=1.0, effort=effort, below=ANY_TIME)
        if result is None:
            return None
        plan = finished(wanted, pricer, result)
        factor = max(stage.memory.total / unit.of(stage.device) for stage in plan.stages)
        if not plan.schedule.simple:  # a search counts more than is priced
            factor = min(2.0 * factor, budget.most / unit.most)
        return unit.scaled(factor).plus(bool(asked.by_device))

    best, low = fitting(unit.scaled(_BOUNDLESS / unit.most)), 0
    if best is None:
        return None
    while (high := best.most) - low > _SLACK * high:  # by quick searches, which prove nothing
        middle = (low + high) // 2
        found = fitting(unit.scaled(middle / unit.most), QUICK)
        best, low = (best, middle) if found is None else (found, low)
    low, step = 0, max(slack, _SLACK)
    while (high := best.most) - low > max(1, ceil(slack * high)):
        middle = max((low + high) // 2, int((1.0 - step) * high)) if slack or not low else (low + high) // 2
        found = fitting(unit.scaled(middle / unit.most))
        best, low = (best, middle) if found is None else (found, low)
        step = max(slack, step / 2) if found is None else min(2 * step, 0.5)
    return best


def suggestions(request: Request, session: Session, backend: str) -> str:
    """Sentences on what alone makes a plan fit, each with such a plan; empty where nothing of it does.

    Args:
        request: that no plan fits.
        session: of the profile.
        backend: that the request is for.
    """
    found = [f"It fits {said}: {plan}." for said, own in _wider(request, session, backend)
             if (plan := _first_plan(own, session.pricer))]  # fmt: skip
    for profile in _larger(request, session):
        larger = Session(profile, session.mode)
        own = replace(request, devices=profile.cluster.devices).on(*larger.space(backend_named(backend)))
        plan = _first_plan(own, larger.pricer)
        if plan:
            found.append(f"It fits on {own.devices} devices: {plan}.")
            break
    return " ".join(found)


def _larger(request: Request, session: Session) -> Iterator[Profile]:
    """The profile on a cluster of half as many nodes more, of twice and of four times as many."""
    profile, cluster = session.profile, session.profile.cluster
    outer = cluster.levels[-1]
    if not cluster.alike or len(cluster.levels) < 2 or request.devices < cluster.devices:
        return
    for size in (*([outer.size * 3 // 2] * (outer.size % 2 == 0)), 2 * outer.size, 4 * outer.size):
        group = replace(cluster.groups[0], count=cluster.devices // outer.size * size)
        levels = (*cluster.levels[:-1], replace(outer, size=size))
        yield profile.on(replace(cluster, levels=levels, groups=(group,)))


def _wider(request: Request, session: Session, backend: str) -> Iterator[tuple[str, Request]]:
    """The request without one pin or one forbidden dimension, and for the backend that runs all there is."""
    fixed = request.fixed
    for name, value, without in (
        ("pp", fixed.pipeline, replace(fixed, pipeline=None)),
        ("microbatches", fixed.microbatches, replace(fixed, microbatches=None)),
        ("virtual", fixed.virtual, replace(fixed, virtual=None)),
        ("schedule", fixed.schedule, replace(fixed, schedule=None)),
    ):
        if value is not None:
            yield f"without --fix {name}", replace(request, fixed=without)
    for pin in fixed.strategy:
        without = replace(fixed, strategy=tuple(own for own in fixed.strategy if own != pin))
        yield f"without --fix {typed_name(pin[0])}", replace(request, fixed=without)
    for pinned in fixed.layers:
        layers, name, pinned_value = pinned
        plain = getattr(Strategy(), name)
        if pinned_value != plain:
            rest = tuple((layers, name, plain) if other == pinned else other for other in fixed.layers)
            said = f"with --fix {layers}.{typed_name(name)}={_value(plain)}"
            yield said, replace(request, fixed=replace(fixed, layers=rest))
    for dimension in fixed.forbidden:
        allowed = tuple(other for other in fixed.forbidden if other != dimension)
        yield f"without --forbid {dimension}", replace(request, fixed=replace(fixed, forbidden=allowed))
    if backend != ANY.name:
        wider = replace(request, schedules=ANY.schedules)
        yield f"with --backend {ANY.name}", wider.on(*session.space(ANY))


def _first_plan(request: Request, pricer: LayerPricer) -> str:
    """A plan in a line, the first that a search meets; empty where none is met."""
    found = search(request, pricer, slack=1.0, effort=_FIRST, below=ANY_TIME)
    return "" if found is None else summary(plain(request, found))
