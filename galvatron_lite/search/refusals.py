"""Errors for requests that leave no plan: before anything is priced, and where nothing fits the memory.

Where nothing fits, the error names the least memory that a plan needs, and what alone would make one fit. A search that
ends with the first plan it meets answers whether anything fits a budget; the smallest budget is bisected between one
that no plan fits and what a plan needs. Exact for models of few layers; for others searches end at 3 % from one that
fits, or after some work, and the error says that the budget is approximate. Where devices of several types have budgets
of their own, memory counts as a share of them. Pins to lift, dimensions to allow again, other backends and more devices
are searched, not guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, inf

from galvatron_lite.cluster.budget import Budget, as_budget, bytes_on
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.model.graph import Layer, ModelGraph, Role
from galvatron_lite.parallelism.backends import ANY, backend_named
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.layout import layout_of, strategy_with
from galvatron_lite.parallelism.registry import REFUSING, choosing
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.alternatives import UNBOUNDED
from galvatron_lite.search.best_first import ANY_TIME, QUICK, finished, plain, search
from galvatron_lite.search.pin_names import typed_name
from galvatron_lite.search.problem import is_glued
from galvatron_lite.search.result import summary
from galvatron_lite.search.shapes import Request, Session
from galvatron_lite.search.space import Fixed, microbatch_counts
from galvatron_lite.search.tables import Glue, glue_of
from galvatron_lite.units import format_budget

_EXACT_LAYERS = 8
"""Layers of a model up to which the smallest budget is exact."""
_SLACK = 0.03
"""Share of its memory within which the search for a leaner plan of a model with more layers ends."""
_EFFORT, _FIRST = 150_000_000, 300_000
"""Labels, by layers, after which a search gives up as if nothing fitted, and of one for what alone would make a plan
fit."""


def check_layers(request: Request) -> None:
    """Check that every layer can be split as it is pinned.

    Raises:
        InputError: one cannot; with the layer, the reason, and what it offers.
    """
    refusing = {dimension.degree: dimension for dimension in REFUSING}
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
            raise _contradicting(request, layer, pins)


def _contradicting(request: Request, layer: Layer, pins: dict[str, object]) -> InputError:
    """The error for a layer that offers each of its pins, but not all; with what it offers beside the others."""
    fixed, offers = request.fixed.at_layer(layer.name), []
    for field in reversed(pins):
        others = replace(fixed, strategy=tuple(pin for pin in fixed.strategy if pin[0] != field))
        values = {_value(getattr(strategy, field)) for strategy in request.offered(layer, others)}
        offers += [f"{field} {', '.join(sorted(values))}"] if values else []
    stage = "" if request.pipelines == (1,) else "any stage of "
    remedy = f"No strategy of {layer.name} on {stage}{request.devices} devices has all that is pinned for it; "
    remedy += f"beside the other pins it offers {' or '.join(offers)}." if offers else "lift some of the pins."
    options = " ".join(f"--fix {layer.name}.{typed_name(field)}" for field in pins)
    return InputError(options, ", ".join(map(_value, pins.values())), remedy)


def _value(value: object) -> str:
    return str(getattr(value, "value", value))


def _strategies(request: Request, layer: Layer, devices: int) -> tuple[Strategy, ...]:
    return request.space.strategies(layer.kind, devices, request.fixed.at_layer(layer.name))


def _unglued(request: Request) -> str:
    """A sentence where the layers before and after the blocks have no layout in common, as those of one stage must;
    empty where they have, or where there are several stages."""
    graph, by_glue = request.graph, dict[str, dict[Glue, Strategy]]()
    for layer in graph.layers if 1 in request.pipelines and is_glued(graph) else ():
        if layer.role is not Role.BLOCK:
            strategies = _strategies(request, layer, request.devices)
            by_glue[layer.name] = {glue_of(layout_of(strategy)): strategy for strategy in reversed(strategies)}
    if len(by_glue) <= 1 or set.intersection(*({*glues} for glues in by_glue.values())):
        return ""
    texts = []
    for name, glues in by_glue.items():  # a few, recomputation and ZeRO left out
        plain = dict.fromkeys(str(strategy_with(layout_of(strategy))) for strategy in glues.values())
        some = ", ".join([*plain][:4]) + (", ..." if len(plain) > 4 else "")
        texts.append(f"{name}: {some or 'nothing with what is pinned'}")
    return (
        "Layers before and after the blocks of a stage split samples, pixels and channels alike, but offer "
        f"{'; '.join(texts)}."
    )


def check_batch(request: Request) -> None:
    """Check that some split of the layers divides the batch.

    A layer with strategies of batch degrees D can work on a micro-batch that some degree of D divides; a batch will do
    where one pipeline degree and one micro-batch count suit every layer.

    Raises:
        InputError: none does; names the nearest batches that can be divided.
    """
    counts = microbatch_counts(request.global_batch, request.fixed)
    unlike = {(layer.kind, request.fixed.pins_of(layer.name)): layer for layer in request.graph.layers}
    units, unable = [], dict[str, None]()
    for stages in request.pipelines:
        size = request.devices // stages
        degrees = {
            layer.name: {strategy.batch_degree for strategy in _strategies(request, layer, size)}
            for layer in unlike.values()
        }
        if not all(degrees.values()):
            unable |= dict.fromkeys(name for name, degree in degrees.items() if not degree)
            continue
        # the least divisor of the stage that one degree of every layer divides
        unit = next(u for u in divisors(size) if all(any(u % d == 0 for d in degree) for degree in degrees.values()))
        if any(request.global_batch // count % unit == 0 for count in counts):
            return
        units.append(unit)
    if not units:
        raise _without_strategies(request, list(unable), [layer for layer in unlike.values() if layer.name in unable])
    step = min(unit * (request.fixed.microbatches or 1) for unit in units)
    below = request.global_batch // step * step
    nearest = " or ".join(str(batch) for batch in (below, below + step) if batch)
    raise InputError(
        "--batch", request.global_batch, f"It cannot be shared among {request.devices} devices; the nearest: {nearest}."
    )


def _without_strategies(request: Request, names: Sequence[str], layers: Sequence[Layer]) -> InputError:
    """The error for pins that leave some layers no strategy."""
    kinds = [replace(request.graph.kind_of(layer), name=layer.name) for layer in layers[:1]]
    reasons = [reason for dimension in choosing() for kind in kinds if (reason := dimension.reason(kind))]
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    pins = " ".join(f"{typed_name(name)}={_value(value)}" for name, value in request.fixed.pinned) or "nothing"
    remedy = f"On {request.devices} devices nothing is left for {some or 'the layers'}; lift one of the pins."
    return InputError("--fix", pins, " ".join([remedy, *(f"{reason}." for reason in reasons[:2])]))


def unprofiled(request: Request, pricer: LayerPricer) -> tuple[str, ...]:
    """Strategies left out because the profile has no figures for them, a line for each kind of layer.

    What a device does can also be done on a multiple of the devices, so that the largest stages are looked at; groups
    that must lie within a node do there too, unless the smaller stage is within a node that its devices do not divide.
    """
    node, lines = request.space.node_devices, []
    sizes = {request.devices // stages for stages in request.pipelines}
    uneven = {size for size in sizes if size <= node and node % size}
    largest = [
        size
        for size in sizes
        if not any(more > size and more % size == 0 and (more <= node or size not in uneven) for more in sizes)
    ]
    for kind in sorted({layer.kind for layer in request.graph.layers}):
        options = {strategy for size in largest for strategy in request.space.strategies(kind, size, Fixed())}
        missing = {str(pricer.worked(strategy)) for strategy in options if not pricer.covers(kind, strategy)}
        if missing:
            lines.append(f"profile: {kind}: no figures for {', '.join(sorted(missing))}")
    return tuple(lines)


def skipping(graph: ModelGraph) -> tuple[str, ...]:
    """What the space leaves out where tensors of the model skip layers; empty where none does."""
    places = {layer.name: place for place, layer in enumerate(graph.layers)}
    sent = [tensor for tensor in graph.tensors if tensor.size]  # the batch itself every stage has
    far = [tensor for tensor in sent if max(places[name] for name in tensor.readers) > places[tensor.producer] + 1]
    if not far:
        return ()
    return (
        f"Tensors that skip layers ({len(far)}, the first made by {far[0].producer}) go from stage to stage up to the "
        "one that reads them; sends past the stages between are not searched.",
    )


def infeasible(request: Request, pricer: LayerPricer, means: str = "", below: float = inf) -> InfeasibleError:
    """The error for a budget that is too small, with the smallest that fits and, for people, by which means; without
    one where it is not less than ``below`` bytes."""
    slack = 0.0 if len(request.graph.layers) <= _EXACT_LAYERS else _SLACK
    least = least_budget(request, pricer, slack, below * (1.0 - request.margin))
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


def least_budget(request: Request, pricer: LayerPricer, slack: float = 0.0, below: float = inf) -> Budget | None:
    """The least memory that a plan of the space fits, in the proportion of the request's budget; None where the space
    is empty, or has no plan that fits less than ``below`` bytes.

    Args:
        request: what is planned; of its budget only the proportion between types of devices matters.
        pricer: prices layers.
        slack: 0.0: no plan needs less; else the search ends where nothing is met below ``1 - slack`` of the memory.
    """
    proportion = as_budget(request.budget)
    unit = proportion.scaled(1.0) if proportion.by_device else Budget(1)
    exact = _EFFORT // len(request.graph.layers)

    def fitting(most: float, effort: int = exact) -> Budget | None:
        """The memory of a plan that fits so many bytes; None where there is none."""
        budget = unit.scaled(most / unit.most)
        limited = replace(request, budget=budget if proportion.by_device else budget.least)
        result = search(limited, pricer, slack=1.0, effort=effort, below=ANY_TIME)
        if result is None:
            return None
        plan = finished(limited, pricer, result)
        factor = max(stage.memory.total / unit.of(stage.device) for stage in plan.stages)
        if not plan.schedule.simple:  # a search counts more than is priced
            factor = min(2.0 * factor, budget.most / unit.most)
        return unit.scaled(factor).plus(bool(proportion.by_device))

    best, low = fitting(min(below - 1, UNBOUNDED)), 0
    if best is None:
        return None
    while (high := best.most) - low > _SLACK * high:  # by quick searches, which prove nothing
        middle = (low + high) // 2
        smaller = fitting(middle, QUICK)
        best, low = (best, middle) if smaller is None else (smaller, low)
    low, step = 0, max(slack, _SLACK)
    while (high := best.most) - low > max(1, ceil(slack * high)):
        middle = max((low + high) // 2, int((1.0 - step) * high)) if slack or not low else (low + high) // 2
        smaller = fitting(middle)
        best, low = (best, middle) if smaller is None else (smaller, low)
        step = max(slack, step / 2) if smaller is None else min(2 * step, 0.5)
    return best


def suggestions(request: Request, session: Session, backend: str) -> str:
    """Sentences on what alone makes a plan fit, each with such a plan; empty where nothing does.

    Args:
        request: that no plan fits.
        session: of the profile.
        backend: that the request is for.
    """
    sentences = [
        f"It fits {change}: {plan}."
        for change, wider in _wider(request, session, backend)
        if (plan := first_plan(wider, session.pricer))
    ]
    for profile in _larger(request, session):
        larger = Session(profile, session.mode)
        wider = replace(request, devices=profile.cluster.devices).on(*larger.space(backend_named(backend)))
        plan = first_plan(wider, larger.pricer)
        if plan:
            sentences.append(f"It fits on {wider.devices} devices: {plan}.")
            break
    return " ".join(sentences)


def _larger(request: Request, session: Session) -> Iterator[Profile]:
    """The profile on clusters of one and a half times, twice and four times as many nodes."""
    profile, cluster = session.profile, session.profile.cluster
    outer = cluster.levels[-1]
    if not cluster.alike or len(cluster.levels) < 2 or request.devices < cluster.devices:
        return
    for size in (*([outer.size * 3 // 2] * (outer.size % 2 == 0)), 2 * outer.size, 4 * outer.size):
        group = replace(cluster.groups[0], count=cluster.devices // outer.size * size)
        levels = (*cluster.levels[:-1], replace(outer, size=size))
        yield profile.on(replace(cluster, levels=levels, groups=(group,)))


def _wider(request: Request, session: Session, backend: str) -> Iterator[tuple[str, Request]]:
    """The request without one pin or one forbidden dimension, and for the backend that offers most; each with the
    change, for people."""
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
        without = replace(fixed, strategy=tuple(other for other in fixed.strategy if other != pin))
        yield f"without --fix {typed_name(pin[0])}", replace(request, fixed=without)
    for pinned in fixed.layers:
        layers, name, pinned_value = pinned
        unused = getattr(Strategy(), name)
        if pinned_value != unused:
            lifted = tuple((layers, name, unused) if other == pinned else other for other in fixed.layers)
            change = f"with --fix {layers}.{typed_name(name)}={_value(unused)}"
            yield change, replace(request, fixed=replace(fixed, layers=lifted))
    for dimension in fixed.forbidden:
        allowed = tuple(other for other in fixed.forbidden if other != dimension)
        yield f"without --forbid {dimension}", replace(request, fixed=replace(fixed, forbidden=allowed))
    if backend != ANY.name:
        wider = replace(request, schedules=ANY.schedules)
        yield f"with --backend {ANY.name}", wider.on(*session.space(ANY))


def first_plan(request: Request, pricer: LayerPricer) -> str:
    """A plan in a line, the first that a search meets; empty where none is met."""
    solved = search(request, pricer, slack=1.0, effort=_FIRST, below=ANY_TIME)
    return "" if solved is None else summary(plain(request, solved))
