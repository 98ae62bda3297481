"""Plans of a task under several sets of pins, of which the best counts.

A backend may treat all layers alike, so that the search is repeated for each strategy that all of them may have
(``with_alike``); and it may use host memory only where nothing fits without it (``with_reserve``).
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from math import inf
from operator import itemgetter

from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.plan import price_plan
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.parallelism.backends import Backend
from galvatron_lite.parallelism.strategy import changed
from galvatron_lite.plans.schema import Plan, Proof
from galvatron_lite.search.alternatives import UNBOUNDED
from galvatron_lite.search.best_first import search
from galvatron_lite.search.families.family import PlanTask, seconds_of, with_others
from galvatron_lite.search.pin_names import typed_name
from galvatron_lite.search.refusals import first_plan, infeasible
from galvatron_lite.search.shapes import Request
from galvatron_lite.search.space import Fixed
from galvatron_lite.units import format_bytes

Pins = tuple[tuple[str, object], ...]
"""Fields of ``Strategy`` and their values."""
_PROMISING, _REACH, _WORK = 4, 0.02, 400_000
"""Sets of pins that are planned in full, how far their closed forms may be above the least, and labels of a search for
that."""


def with_alike(planned: Callable[[PlanTask], Plan], task: PlanTask, runners_up: int) -> Plan:
    """The quickest plan of all in which the backend may treat all layers alike (``Backend.uniform``), or must
    because all layers have the same samples (``Profile.folded``).

    With the backend's fields pinned, the search is exact over all that is left (recomputation by layer,
    micro-batches); so the quickest plan of all pins is the quickest there is. Of many pins, only those whose best
    plans take least by the closed form are planned in full. A layer without parameters is left as it is: it
    has nothing to shard.

    Args:
        planned: finds the best plan of a task.
        task: what is planned.
        runners_up: how many other plans to report.

    Raises:
        InfeasibleError: nothing fits; with the smallest budget of all.
        InputError: pins leave nothing, or the batch cannot be shared out.
    """
    graph, request, folded = task.request.graph, task.request, task.session.profile.folded
    samples = ("batch_degree",) if folded and task.backend.uniform == () else ()
    fields = (*task.backend.uniform, *samples)
    if not fields:
        return planned(task)
    names = dict.fromkeys(layer.kind for layer in graph.layers)
    kinds = {name for name in names if folded or graph.kinds[name].parameters.total > 0 or graph.kinds[name].shares}
    choices = [
        replace(fixed, layers=(*fixed.layers, *block_pins), even=fixed.even or task.backend.even)
        for pins in _uniform_pins(request, fields, kinds)
        for fixed in _staged(task, _pinned(request, kinds, pins), pins)
        for block_pins in _block_pins(task, pins)
    ]
    plans, errors = list[Plan](), list[InfeasibleError]()
    for fixed in choices if len(choices) <= _PROMISING else _most_promising(task, choices):
        try:
            plans.append(planned(replace(task, request=replace(request, fixed=fixed))))
        except InfeasibleError as error:
            errors.append(error)
        except InputError as error:
            if not samples or error.field != "--fix":  # else the pins leave nothing for samples shared like that
                raise
    if plans:
        plans.sort(key=seconds_of)
        return _proven(with_others(plans, runners_up), plans)
    if errors:
        raise min(errors, key=lambda error: error.smallest_budget or inf)
    raise _nothing_trains(task)


def _nothing_trains(task: PlanTask) -> InputError:
    """The error where the backend trains with none of the strategies that the pins leave."""
    fixed = task.request.fixed
    pins = [("", name, value) for name, value in fixed.pinned]
    pins += [(f"{layers}.", name, value) for layers, name, value in fixed.layers]
    texts = [f"{layers}{typed_name(name)}={getattr(value, 'value', value)}" for layers, name, value in pins]
    remedy = f"Backend {task.backend.name} has no way to train with these pins; lift one of them."
    if task.session.profile.folded and not task.backend.uniform:
        remedy = (
            f"All layers must share the batch alike, because of {task.session.profile.folded} (several rows a sample, "
            "samples along another dim than the first, or what depends on all samples of a share); with these pins "
            "they cannot. Lift one of them."
        )
    return InputError("--fix", ", ".join(texts) or "nothing", remedy)


def _proven(best: Plan, plans: Sequence[Plan]) -> Plan:
    """A plan, with a gap that counts what the searches for all plans may have left out."""
    if best.provenance is None:
        return best
    sources = [(seconds_of(plan), plan.provenance) for plan in plans if plan.provenance is not None]
    least = min(seconds * (1.0 - source.gap) for seconds, source in sources)
    gap = max(1.0 - least / seconds_of(best), best.provenance.gap, 0.0)
    stopped = any(source.interrupted for _, source in sources)
    proof = Proof.FEASIBLE if gap > best.provenance.tolerance else best.provenance.proof
    return replace(best, provenance=replace(best.provenance, gap=gap, proof=proof, interrupted=stopped))


def _uniform_pins(request: Request, fields: Sequence[str], kinds: Collection[str]) -> Iterator[Pins]:
    """Values of the fields that all layers may share: every one of these kinds has a strategy with them."""
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
    """The pins of a request with more pins, of the layers of some kinds."""
    fixed, graph = request.fixed, request.graph
    if len(kinds) == len({layer.kind for layer in graph.layers}):
        return fixed.with_pins(pins)
    layer_pins = ((layer.name, *pin) for layer in graph.layers if layer.kind in kinds for pin in pins)
    return replace(fixed, layers=(*fixed.layers, *layer_pins))


def _staged(task: PlanTask, fixed: Fixed, pins: Pins) -> Iterator[Fixed]:
    """The same with a pipeline or without one, where the backend has these values only so."""
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


def _block_pins(task: PlanTask, pins: Pins) -> Iterator[tuple[tuple[str, str, object], ...]]:
    """Pins of blocks beside those of all layers: one value of each field that all blocks share.

    Kinds of blocks that do not have a field's value (dense blocks of a mixture) are left without it.
    """
    graph, fields, backend = task.request.graph, task.backend.block_uniform, task.backend
    kinds = {layer.kind: layer for layer in graph.layers}
    blocks = dict.fromkeys(kind for kind, layer in kinds.items() if layer.role is Role.BLOCK)
    if not fields or not blocks:
        yield ()
        return
    offered = {}
    for kind, layer in kinds.items():
        strategies = task.request.offered(layer, task.request.fixed.at_layer(layer.name).with_pins(pins))
        if kind in blocks and backend.block_rule is not None:
            strategies = [strategy for strategy in strategies if backend.block_rule(strategy)]
        offered[kind] = strategies
    names = (*fields, *dict(backend.edges))
    values_of = {
        kind: {(name, getattr(strategy, name)) for strategy in strategies for name in names}
        for kind, strategies in offered.items()
    }
    globs = {kind: _globs(graph, kind) for kind in kinds}
    block_strategies = [strategy for kind in blocks for strategy in offered[kind]]
    for values in dict.fromkeys(tuple(getattr(strategy, name) for name in fields) for strategy in block_strategies):
        shared = dict(zip(fields, values, strict=True))
        around = {name: shared.get(name) if value is None else value for name, value in backend.edges}
        yield tuple(
            (glob, name, value)
            for inside in (False, True)
            for kind in kinds
            if (kind in blocks) is inside
            for name, value in (shared if inside else around).items()
            if (name, value) in values_of[kind]
            for glob in globs[kind]
        )


def _globs(graph: ModelGraph, kind: str) -> list[str]:
    """Patterns that match the names of the layers of a kind and of no others."""
    names = [layer.name for layer in graph.layers if layer.kind == kind]
    glob = f"{os.path.commonprefix(names)}*"  # noqa: RUF071 - of names, not paths
    matching = fnmatch.filter([layer.name for layer in graph.layers], glob)
    return [glob] if matching == names and len(names) > 1 else names


def _most_promising(task: PlanTask, candidates: Sequence[Fixed]) -> list[Fixed]:
    """The pins whose best plans take least by the closed form, quickest first."""
    promising, limit, pricer = list[tuple[int, Fixed]](), inf, task.session.pricer
    search(task.request, pricer, effort=_WORK, slack=_REACH)  # for bounds that hold under any pins
    for fixed in candidates:
        request = replace(task.request, fixed=fixed, wider=task.request)
        best = search(request, pricer, below=limit, effort=_WORK)
        if best is not None:
            limit = min(limit, int(best.partition.time * (1.0 + _REACH)))
            promising.append((best.partition.time, fixed))
    promising.sort(key=itemgetter(0))
    return [fixed for _, fixed in promising[:_PROMISING]] or list(candidates[-_PROMISING:])


def with_reserve(planned: Callable[..., Plan], task: PlanTask) -> Plan:
    """The plan of a task; where none fits in device memory, the first that fits with the backend's reserve.

    Args:
        planned: finds the plan of a task; ``explain=False`` leaves out of its error what would make a plan fit.
        task: what is planned.

    Raises:
        InfeasibleError: nothing fits either way.
    """
    attempts = [*_with_host_memory(task)]
    if not attempts:
        return planned(task)
    too_large = list[PlanTask]()
    for attempt in [task, *attempts]:
        try:
            plan = planned(attempt, explain=False)
        except InfeasibleError:
            too_large.append(attempt)
            continue
        except InputError:
            if attempt is task:
                raise
            continue  # the user's pins leave no layer in host memory
        return plan if attempt is task else _noted(plan, task)
    try:
        return planned(task)
    except InfeasibleError as error:
        raise _least_demanding(error, too_large[1:]) from None


def _least_demanding(error: InfeasibleError, attempts: Sequence[PlanTask]) -> InfeasibleError:
    """The error of a task, or of the attempt with the backend's reserve that needs a smaller budget."""
    least = error
    for attempt in attempts:
        name, value = attempt.request.fixed.strategy[-1]
        means = f" with host memory ({typed_name(name)}={getattr(value, 'value', value)})"
        other = infeasible(attempt.request, attempt.session.pricer, means, least.smallest_budget or inf)
        least = min(least, other, key=lambda error: error.smallest_budget or inf)
    _, _, remedies = str(error).partition("\n")
    return error if least is error else InfeasibleError(f"{least}\n{remedies}".strip(), least.smallest_budget)


def _with_host_memory(task: PlanTask) -> Iterator[PlanTask]:
    """The task under each use of the backend's reserve in all layers; none where pins decide it or there is none."""
    fixed = task.request.fixed
    decided = {*fixed.forbidden, *(name for name, _ in fixed.pinned), *(name for _, name, _ in fixed.layers)}
    for name, usual in task.backend.reserved.items() if task.session.profile.cluster.device.host_bandwidth else ():
        if name not in decided and isinstance(usual, Enum):
            for value in type(usual):
                if value is not usual:
                    yield replace(task, request=replace(task.request, fixed=fixed.with_pins(((name, value),))))


def _noted(plan: Plan, task: PlanTask) -> Plan:
    """A plan with a note on the bytes that it keeps in host memory, and why."""
    need = format_bytes(_reserve_bytes(task.session.pricer, plan, task.backend))
    fits = first_plan(replace(task.request, budget=UNBOUNDED), task.session.pricer)
    why = "Nothing fits in device memory alone" if fits else "With these pins no plan keeps all data on the devices"
    note = f"{why}: about {need} of each device's data are kept in host memory"
    source = plan.provenance and replace(plan.provenance, notes=(note, *plan.provenance.notes))
    return replace(plan, provenance=source)


def _reserve_bytes(pricer: LayerPricer, plan: Plan, backend: Backend) -> int:
    """Bytes by which the fullest device would need more memory of its own without the backend's reserve."""
    stages = tuple(
        replace(stage, runs=tuple(replace(run, strategy=changed(run.strategy, backend.reserved)) for run in stage.runs))
        for stage in plan.stages
    )
    without = price_plan(pricer, replace(plan, stages=stages))
    return max(a.memory.total - b.memory.total for a, b in zip(without.stages, plan.stages, strict=True))
