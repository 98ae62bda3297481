"""Plans beside those of stages in the model's order: each way to make some is asked, and the quickest plan counts."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from galvatron_lite.cost.plan import price_plan
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.parallelism.backends import Backend
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Alternative, Plan, Proof
from galvatron_lite.search.best_first import search
from galvatron_lite.search.pins import typed_name
from galvatron_lite.search.result import plan_of, summary
from galvatron_lite.search.shapes import Request, Session
from galvatron_lite.search.space import Delay, Fixed
from galvatron_lite.units import format_budget, format_seconds

_ROUNDING = 1e-9
_WORTH = 0.01
"""Share of a step by which one device must be quicker than the plan for that to be said."""


@dataclass(frozen=True, slots=True)
class PlanTask:
    """What a family of plans is asked for."""

    session: Session  # of the profile and the mode
    request: Request  # what is planned
    backend: Backend  # what is to run the plan
    delay: Delay | None = None  # which rules of delayed gradients the user allows; None: none
    ordinary: Plan | None = None  # the best plan of stages in the model's order; None where none fits
    certify: bool = False  # whether integer programmes are to say the same as the search
    tolerance: float = 0.0  # see ``find_plan``


PlanFamily = Callable[[PlanTask], Sequence[Plan]]
"""Plans of one family with their prediction and provenance, whether they fit or not; none where it offers none."""


def with_families(
    ordinary: Callable[[], Plan], task: PlanTask, runners_up: int, families: Sequence[PlanFamily]
) -> Plan:
    """The quickest plan that fits, the ordinary one of equal ones; the other is among its alternatives.

    Args:
        ordinary: finds the best plan of stages in the model's order.
        task: what is planned.
        runners_up: how many other plans to report.
        families: to ask besides.

    Raises:
        InfeasibleError: that of the ordinary search with what other families need, where they have no plan that fits
            either.
        InputError: the same where the ordinary search cannot share out the batch.
    """
    only = task.delay is not None and task.delay.only
    first, refused = None, InfeasibleError(f"No such plan of {task.request.graph.name} fits.")
    try:
        first = ordinary()
    except (InfeasibleError, InputError) as error:
        refused = error  # type: ignore[assignment]
    task = replace(task, ordinary=first)
    candidates = sorted((plan for family in families for plan in family(task)), key=seconds_of)
    fitting = [plan for plan in candidates if plan.fits and (plan.cyclic is not None or not only)]
    if not fitting and (first is None or (only and candidates)):
        raise _needing(candidates, refused) if isinstance(refused, InfeasibleError) else refused
    if first is None:
        return led(fitting, runners_up)
    quicker = [plan for plan in fitting if only or seconds_of(plan) < seconds_of(first) * (1.0 - _ROUNDING)]
    others = [plan for plan in candidates if not any(plan is other for other in quicker)]
    return led([*quicker, first, *others], runners_up) if candidates else first


def _needing(plans: Sequence[Plan], error: InfeasibleError) -> InfeasibleError:
    """The error with the plan of other families that needs least memory."""
    if not plans:
        return error
    least = min(plans, key=_peak)
    more = f"Another way needs {format_budget(_peak(least), up=True)} at least: {summary(least)}."
    smallest = [] if error.smallest_budget is None else [error.smallest_budget]
    return InfeasibleError(f"{error} {more}", min([_peak(least), *smallest]))


def _peak(plan: Plan) -> int:
    return plan.prediction.peak_memory if plan.prediction else 0


def led(plans: Sequence[Plan], wanted: int) -> Plan:
    """The first of some plans, with the others told beside it, then their alternatives."""
    best, listed = plans[0], dict[str, Alternative]()
    for plan in reversed(plans):
        without = "without delay: " if best.cyclic is not None and plan.cyclic is None else ""
        ends = (plan.provenance.least_seconds, plan.provenance.most_seconds) if plan.provenance else (0.0, 0.0)
        plain = Alternative(without + summary(plan), seconds_of(plan), _peak(plan), bool(plan.fits), *ends)
        listed[summary(plan)] = plain
    for other in (alternative for plan in plans for alternative in plan.alternatives):
        listed.setdefault(other.summary, other)
    del listed[summary(best)]
    searched = [listed.pop(summary(plan)) for plan in plans[1:] if summary(plan) in listed]
    kept = [*searched, *listed.values()][: max(wanted, 0)]
    kept.sort(key=lambda other: (not other.fits, other.step_seconds))
    return replace(best, alternatives=tuple(kept))


def seconds_of(plan: Plan | None) -> float:
    """Of a step; infinite without a plan or a prediction."""
    return plan.prediction.step_seconds if plan is not None and plan.prediction else float("inf")


def with_one_device(plan: Plan, task: PlanTask) -> Plan:
    """The plan, with a note where one device with no strategy at all is predicted to take less and fits.

    Args:
        plan: found, on all devices.
        task: what was planned.
    """
    if plan.devices == 1 or plan.provenance is None or task.request.cluster is not None:
        return plan
    graph, quickest = task.request.graph, plan
    for count in sorted({1, plan.microbatches}):
        alone = plan_of(
            graph, devices=1, global_batch=task.request.global_batch, microbatches=count,
            cuts=(0, len(graph.layers)), strategies=[Strategy()] * len(graph.layers),
        )  # fmt: skip
        try:
            alone = price_plan(task.session.pricer, replace(alone, mode=task.session.mode))
        except InputError:
            continue
        alone = replace(alone, provenance=plan.provenance)
        quickest = min(quickest, alone, key=seconds_of) if alone.fits else quickest
    if seconds_of(quickest) > (1.0 - _WORTH) * seconds_of(plan):
        return plan
    seconds = f"{format_seconds(seconds_of(quickest))} instead of {format_seconds(seconds_of(plan))}"
    measured = task.session.profile.origin.kind.value == "measured"  # for so many devices and no other number
    how = "profile and train with one process" if measured else "use one device (--gpus 1)"
    note = f"a single device is predicted to be faster ({seconds}): {how}"
    return replace(plan, provenance=replace(plan.provenance, notes=(*plan.provenance.notes, note)))


Pins = tuple[tuple[str, object], ...]
_PROMISING, _REACH, _WORK = 4, 0.02, 400_000
"""Ways that are planned in full, how far their closed forms may be above the least, and labels of a search for it."""


def with_alike(looked: Callable[[PlanTask], Plan], task: PlanTask, runners_up: int) -> Plan:
    """The quickest plan of all in which the backend may treat all layers alike (``Backend.uniform``), or must
    because all layers have the same samples (``ModelGraph.folded``).

    With the backend's fields pinned, the search is exact over all that is left (recomputation by layer,
    micro-batches); so the quickest plan of all pins is the quickest there is. Of many pins, only those whose best
    plans take least by the closed form are planned in full. A layer without parameters is left as it is: it
    has nothing to shard.

    Args:
        looked: finds the best plan that keeps the pins of what is asked.
        task: what is planned.
        runners_up: how many other plans to report.

    Raises:
        InfeasibleError: nothing fits; with the smallest budget of all.
        InputError: pins leave nothing, or the batch cannot be shared out.
    """
    graph, request = task.request.graph, task.request
    samples = ("batch_degree",) if graph.folded and task.backend.uniform == () else ()
    fields = (*task.backend.uniform, *samples)
    if not fields:
        return looked(task)
    names = dict.fromkeys(layer.kind for layer in graph.layers)
    kinds = {name for name in names if graph.folded or graph.kinds[name].parameters.total > 0}
    choices = [
        replace(every, layers=(*every.layers, *block_pins), even=every.even or task.backend.even)
        for pins in _uniform_pins(request, fields, kinds)
        for every in _staged(task, _pinned(request, kinds, pins), pins)
        for block_pins in _pinned_families(task, pins)
    ]
    candidates, errors = list[Plan](), list[InfeasibleError]()
    for fixed in choices if len(choices) <= _PROMISING else _most_promising(task, choices):
        try:
            candidates.append(looked(replace(task, request=replace(request, fixed=fixed))))
        except InfeasibleError as error:
            errors.append(error)
    if candidates:
        candidates.sort(key=seconds_of)
        return _proven(led(candidates, runners_up), candidates)
    if errors:
        raise min(errors, key=lambda error: error.smallest_budget or float("inf"))
    named = [*request.fixed.pinned, *((f"{layers}.{name}", value) for layers, name, value in request.fixed.layers)]
    pinned = [(*name.rpartition("."), getattr(value, "value", value)) for name, value in named]
    pins_text = (
        ", ".join(f"{layers}{dot}{typed_name(name)}={value}" for layers, dot, name, value in pinned) or "nothing"
    )
    remedy = f"Backend {task.backend.name} has no way to train with these pins; lift one of them."
    raise InputError("--fix", pins_text, remedy)


def _proven(best: Plan, plans: Sequence[Plan]) -> Plan:
    """With a gap that counts what the other searches, where they ended early, may have left out."""
    if best.provenance is None:
        return best
    sources = [(seconds_of(plan), plan.provenance) for plan in plans if plan.provenance is not None]
    least = min(seconds * (1.0 - source.gap) for seconds, source in sources)
    gap = max(1.0 - least / seconds_of(best), best.provenance.gap, 0.0)
    stopped = any(source.interrupted for _, source in sources)
    proof = Proof.FEASIBLE if gap > best.provenance.tolerance else best.provenance.proof
    return replace(best, provenance=replace(best.provenance, gap=gap, proof=proof, interrupted=stopped))


def _uniform_pins(request: Request, fields: Sequence[str], kinds: Collection[str]) -> Iterator[Pins]:
    """Values of the fields that all layers share, of which every one of these kinds has a strategy."""
    layers = [layer for layer in request.graph.layers if layer.kind in kinds]
    unlike = {(layer.kind, request.fixed.pins_of(layer.name)): layer for layer in layers}
    offered = [
        {tuple(getattr(strategy, name) for name in fields) for strategy in request.offered(layer)}
        for layer in unlike.values()
    ]
    common = set.intersection(*offered) if offered else set()
    for values in sorted(common, key=lambda values: [str(value) for value in values]):
        yield tuple(zip(fields, values, strict=True))


def _pinned(request: Request, kinds: Collection[str], pins: Pins) -> Fixed:
    """What is pinned with one way; layer by layer where some have no parameters."""
    fixed, graph = request.fixed, request.graph
    if len(kinds) == len({layer.kind for layer in graph.layers}):
        return fixed.with_pins(pins)
    layer_pins = ((layer.name, *pin) for layer in graph.layers if layer.kind in kinds for pin in pins)
    return replace(fixed, layers=(*fixed.layers, *layer_pins))


def _staged(task: PlanTask, fixed: Fixed, pins: Pins) -> Iterator[Fixed]:
    """One way with a pipeline and without, where the backend has these values only so."""
    piped, alone = (
        all(value in dict(values).get(name, (value,)) for name, value in pins)
        for values in (task.backend.piped, task.backend.alone)
    )
    pinned = 1 if "pipeline" in fixed.forbidden else fixed.pipeline
    if piped and alone:
        yield fixed
    elif alone and pinned in (None, 1):
        yield replace(fixed, pipeline=1)
    elif piped and pinned != 1:
        yield replace(fixed, piped=True)


def _pinned_families(task: PlanTask, pins: Pins) -> Iterator[tuple[tuple[str, str, object], ...]]:
    """Pins of blocks beside those of all layers: one value of each field that all blocks share.

    Kinds of blocks that do not have a field's value (dense blocks of a mixture) are left without it.
    """
    graph, fields, rule = task.request.graph, task.backend.block_uniform, task.backend.block_rule
    kinds = {layer.kind: layer for layer in graph.layers}
    blocks = {kind for kind, layer in kinds.items() if layer.role is Role.BLOCK}
    if not fields or not blocks:
        yield ()
        return
    offered = {
        kind: task.request.offered(layer, task.request.fixed.at_layer(layer.name).with_pins(pins))
        for kind, layer in kinds.items()
    }
    strategies = [one for kind in blocks for one in offered[kind] if rule is None or rule(one)]
    offers = {kind: {(name, getattr(one, name)) for one in every if kind not in blocks or rule is None or rule(one)
                     for name in (*fields, *dict(task.backend.edges))} for kind, every in offered.items()}  # fmt: skip
    globs = {kind: _globs(graph, kind) for kind in kinds}
    for values in dict.fromkeys(tuple(getattr(one, name) for name in fields) for one in strategies):
        shared = dict(zip(fields, values, strict=True))
        around = {name: shared.get(name) if value is None else value for name, value in task.backend.edges}
        yield tuple(
            (glob, name, value)
            for inside in (False, True)
            for kind in kinds
            if (kind in blocks) is inside
            for name, value in (shared if inside else around).items()
            if (name, value) in offers[kind]
            for glob in globs[kind]
        )


def _globs(graph: ModelGraph, kind: str) -> list[str]:
    names = [layer.name for layer in graph.layers if layer.kind == kind]
    glob = f"{os.path.commonprefix(names)}*"  # noqa: RUF071 - of names, not paths
    matching = fnmatch.filter([layer.name for layer in graph.layers], glob)
    return [glob] if matching == names and len(names) > 1 else names


def _most_promising(task: PlanTask, candidates: Sequence[Fixed]) -> list[Fixed]:
    """Those whose best plans take least by the closed form, quickest first."""
    promising, limit = list[tuple[int, Fixed]](), float("inf")
    search(task.request, task.session.pricer, effort=_WORK, slack=_REACH)  # for bounds that hold whatever the way
    for fixed in candidates:
        request = replace(task.request, fixed=fixed, wider=task.request)
        best = search(request, task.session.pricer, below=limit, effort=_WORK)
        if best is not None:
            limit = min(limit, int(best.partition.time * (1.0 + _REACH)))
            promising.append((best.partition.time, fixed))
    promising.sort(key=itemgetter(0))
    return [fixed for _, fixed in promising[:_PROMISING]] or list(candidates[-_PROMISING:])
