"""Plans for backends that do the same to all layers in some respect (``Backend.uniform``), and for models whose layers
must all have the same samples (``ModelGraph.folded``): each way is searched alone.

With the fields of one way pinned, the search is exact over all that is left (recomputation by layer, micro-batches); so
the quickest of all ways' plans is the quickest there is. Where there are many ways, only the most promising are planned
in full: those whose best plans take least by the closed form. A layer without parameters is left as it is: it has
nothing to shard.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from operator import itemgetter

from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.model.graph import ModelGraph, Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan, Proof
from galvatron_lite.search.best_first import search
from galvatron_lite.search.pins import typed_name
from galvatron_lite.search.shapes import Request
from galvatron_lite.search.space import Fixed
from galvatron_lite.search.ways import PlanTask, led, seconds_of

Pins = tuple[tuple[str, object], ...]
_PROMISING, _REACH, _WORK = 4, 0.02, 400_000
"""Ways that are planned in full, how far their closed forms may be above the least, and labels of a search for it."""
FindPlan = Callable[[PlanTask], Plan]
"""Finds the best plan that keeps the pins of what is asked."""


def with_alike(looked: FindPlan, task: PlanTask, runners_up: int) -> Plan:
    """The quickest plan of all ways in which the backend may treat all layers alike.

    Args:
        looked: finds the best plan of one way.
        task: what is planned.
        runners_up: how many other plans to report.

    Raises:
        InfeasibleError: no way fits; with the smallest budget of all.
        InputError: pins leave no way, or the batch cannot be shared out.
    """
    if not _fields(task):
        return looked(task)
    found, errors = list[Plan](), list[InfeasibleError]()
    ways = [
        replace(every, layers=(*every.layers, *own), even=every.even or task.backend.even)
        for pins in _ways(task)
        for every in _staged(task, _pinned(task, pins), pins)
        for own in _block_ways(task, pins)
    ]
    for fixed in ways if len(ways) <= _PROMISING else _most_promising(task, ways):
        pinned = replace(task, request=replace(task.request, fixed=fixed))
        try:
            found.append(looked(pinned))
        except InfeasibleError as error:
            errors.append(error)
    if not found and not errors:
        remedy = f"Backend {task.backend.name} has no way to train with these pins; lift one of them."
        raise InputError("--fix", _pins_text(task.request.fixed), remedy)
    if not found:
        raise min(errors, key=lambda error: error.smallest_budget or float("inf"))
    found.sort(key=seconds_of)
    return _proven(led(found, runners_up), found)


def _proven(best: Plan, plans: Sequence[Plan]) -> Plan:
    """With a gap that counts what other ways' searches, where they ended early, may have left out."""
    if best.provenance is None:
        return best
    least = min(seconds_of(plan) * (1.0 - plan.provenance.gap) for plan in plans if plan.provenance is not None)
    gap = max(1.0 - least / seconds_of(best), best.provenance.gap, 0.0)
    stopped = any(plan.provenance.interrupted for plan in plans if plan.provenance is not None)
    proof = Proof.FEASIBLE if gap > best.provenance.tolerance else best.provenance.proof
    return replace(best, provenance=replace(best.provenance, gap=gap, proof=proof, interrupted=stopped))


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


def _strategies(request: Request, kind: str, fixed: Fixed) -> Iterator[Strategy]:
    """Of a kind of layer, on stages of any size that is tried."""
    for stages in request.pipelines:
        yield from request.space.strategies(kind, request.devices // stages, fixed)


def _ways(task: PlanTask) -> Iterator[Pins]:
    """Values of the fields that all layers share, of which every layer with parameters has a strategy."""
    request, fields = task.request, _fields(task)
    kinds = _kinds(task)
    offered = []
    layers = [layer for layer in request.graph.layers if layer.kind in kinds]
    for (kind, _), layer in {(one.kind, request.fixed.pins_of(one.name)): one.name for one in layers}.items():
        own = _strategies(request, kind, request.fixed.at_layer(layer))
        offered.append({tuple(getattr(strategy, name) for name in fields) for strategy in own})
    common = set.intersection(*offered) if offered else set()
    for values in product(*(sorted({one[place] for one in common}, key=str) for place in range(len(fields)))):
        if values in common:
            yield tuple(zip(fields, values, strict=True))


def _block_ways(task: PlanTask, pins: Pins) -> Iterator[tuple[tuple[str, str, object], ...]]:
    """Pins of blocks beside those of all layers: one value of each field that all blocks share.

    Kinds of blocks that do not have a field's value (dense blocks of a mixture) are left without it.
    """
    request, fields, rule = task.request, task.backend.block_uniform, task.backend.block_rule
    blocks = [layer for layer in request.graph.layers if layer.role is Role.BLOCK]
    if not fields or not blocks:
        yield ()
        return
    offered = dict[str, list[Strategy]]()
    for layer in {one.kind: one for one in request.graph.layers}.values():
        fixed = request.fixed.at_layer(layer.name)
        own = _strategies(request, layer.kind, replace(fixed, strategy=tuple(dict.fromkeys((*fixed.strategy, *pins)))))
        offered[layer.kind] = [each for each in own if layer.role is not Role.BLOCK or rule is None or rule(each)]
    around = {layer.kind: offered.pop(layer.kind) for layer in request.graph.layers if layer.role is not Role.BLOCK}
    for values in {tuple(getattr(own, name) for name in fields): None for every in offered.values() for own in every}:
        chosen = []
        for kind, every in around.items():
            for name, value in ((name, dict(zip(fields, values, strict=True)).get(name) if value is None else value)
                                for name, value in task.backend.edges):  # fmt: skip
                if any(getattr(own, name) == value for own in every):
                    chosen += [(glob, name, value) for glob in _globs(request.graph, kind)]
        for kind, every in offered.items():
            globs = _globs(request.graph, kind)
            for name, value in zip(fields, values, strict=True):
                if any(getattr(own, name) == value for own in every):
                    chosen += [(glob, name, value) for glob in globs]
        yield tuple(chosen)


def _globs(graph: ModelGraph, kind: str) -> list[str]:
    names = [layer.name for layer in graph.layers if layer.kind == kind]
    glob = f"{os.path.commonprefix(names)}*"  # noqa: RUF071 - of names, not paths
    matching = fnmatch.filter([layer.name for layer in graph.layers], glob)
    return [glob] if matching == names and len(names) > 1 else names


def _most_promising(task: PlanTask, ways: Sequence[Fixed]) -> list[Fixed]:
    """Those whose best plans take least by the closed form, quickest first."""
    found, limit = list[tuple[int, Fixed]](), None
    for fixed in ways:
        request = replace(task.request, fixed=fixed)
        try:
            best = search(request, task.session.pricer, below=limit, effort=_WORK)
        except InputError:  # a batch that this way cannot share out
            continue
        if best is not None:
            limit = int(best.partition.time * (1.0 + _REACH))
            found.append((best.partition.time, fixed))
    found.sort(key=itemgetter(0))
    return [fixed for _, fixed in found[:_PROMISING]] or list(ways[-_PROMISING:])


def _pinned(task: PlanTask, pins: Pins) -> Fixed:
    """What is pinned with one way; layer by layer where some have no parameters."""
    fixed, graph = task.request.fixed, task.request.graph
    kinds = _kinds(task)
    if len(kinds) == len({layer.kind for layer in graph.layers}):
        return replace(fixed, strategy=tuple(dict.fromkeys((*fixed.strategy, *pins))))
    own = ((layer.name, *pin) for layer in graph.layers if layer.kind in kinds for pin in pins)
    return replace(fixed, layers=(*fixed.layers, *own))


def _fields(task: PlanTask) -> tuple[str, ...]:
    samples = ("batch_degree",) if task.request.graph.folded and task.backend.uniform == () else ()
    return (*task.backend.uniform, *samples)


def _kinds(task: PlanTask) -> list[str]:
    """Kinds of layers that are treated alike: those with parameters, or all where samples must be the same."""
    graph = task.request.graph
    names = dict.fromkeys(layer.kind for layer in graph.layers)
    return [name for name in names if graph.folded or graph.kinds[name].parameters.total > 0]


def _pins_text(fixed: Fixed) -> str:
    named = [*fixed.pinned, *((f"{layers}.{name}", value) for layers, name, value in fixed.layers)]
    pins = [(*name.rpartition("."), getattr(value, "value", value)) for name, value in named]
    return ", ".join(f"{layers}{dot}{typed_name(name)}={value}" for layers, dot, name, value in pins) or "nothing"
