"""The table of the planner's own cost model: strategies over numbers of devices, with how far each scales.

A strategy scales as far as some layer can still be split among all devices of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from galvatron_lite.model.graph import LayerKind, OperatorClass
from galvatron_lite.oracle.pricing import ClusterCosts, row_of
from galvatron_lite.oracle.rows import HYBRIDS, Forecast, ForecastRow, Limit, Method, StrategyLine, beyond
from galvatron_lite.oracle.strategies import RowQuestion, degree_of, options
from galvatron_lite.parallelism.strategy import Strategy

MOST = 4096  # devices up to which limits are looked for
SHARING = (Method.SPATIAL, Method.FILTER, Method.CHANNEL, *HYBRIDS)
"""Words for devices that share layers."""


def forecast(
    machine: ClusterCosts,
    question: RowQuestion,
    words: Sequence[Method],
    strategies: Sequence[Strategy],
    counts: Sequence[int],
) -> Forecast:
    """The table; words that the model does not allow are left out, with a note."""
    graph = machine.graph
    kinds = [kind for kind in words if allows(machine, kind)]
    lines = [_kind_line(machine, replace(question, kind=kind), counts) for kind in kinds]
    lines += [_text_line(machine, replace(question, strategy=strategy), counts) for strategy in strategies]
    notes = [f"{graph.precision}, {question.batch} samples a replica"]
    if missing := ", ".join(kind.value for kind in words if kind not in kinds):
        notes.append(f"left out, as no layer of {graph.name} can be split so: {missing}")
    origin = machine.profile.origin
    return Forecast(
        graph.name, machine.profile.cluster.name, "galvatron", question.samples,
        f"{origin.kind.value}: {origin.source}", tuple(notes), tuple(lines),
    )  # fmt: skip


def allows(machine: ClusterCosts, kind: Method) -> bool:
    """Whether some layer of the model can be split as a word says."""
    return kind in (Method.SERIAL, Method.DATA, Method.PIPELINE, Method.LAYER) or _ways(machine, kind) > 1


def _kind_line(machine: ClusterCosts, question: RowQuestion, counts: Sequence[int]) -> StrategyLine:
    limit = limit_of(machine, question)
    rows = tuple(_row(machine, replace(question, devices=count), limit) for count in counts)
    return StrategyLine(question.kind.value, rows, limit, _alone(machine, question))


def _alone(machine: ClusterCosts, question: RowQuestion) -> float:
    """Seconds of compute of an epoch on one device, whether or not that has the memory."""
    return row_of(machine, replace(question, kind=Method.SERIAL, devices=1, strategy=None)).compute


def _text_line(machine: ClusterCosts, question: RowQuestion, counts: Sequence[int]) -> StrategyLine:
    """A strategy that is given, with as many more replicas as there are devices for."""
    given = question.strategy
    assert given is not None
    name, unit = str(given), given.devices
    limit = Limit(question.samples // question.batch * unit, f"whole copies of its {unit} GPUs, B at most the data set")
    rows = []
    for count in counts:
        if count % unit:
            problem = f"{name} takes {unit} devices or a multiple"
            rows.append(ForecastRow(name, count, question.batch, 1, problem=problem))
            continue
        more = replace(given, data=given.data * count // unit)
        rows.append(_row(machine, replace(question, devices=count, strategy=more, name=name), limit))
    return StrategyLine(name, tuple(rows), limit, _alone(machine, question))


def _row(machine: ClusterCosts, question: RowQuestion, limit: Limit) -> ForecastRow:
    """A row, with what congestion costs; beyond the limit it says so and has no figures."""
    ended = limit.devices is not None and question.devices > limit.devices
    problem = beyond(limit) if ended else _unshared(machine, question)
    if problem:
        name = question.name or question.kind.value
        return ForecastRow(name, question.devices, question.global_batch, 1, problem=problem)
    found = row_of(machine, question)
    if found.problem or question.devices <= machine.profile.cluster.levels[0].size:
        return found
    free = row_of(machine.alone, question)
    return replace(found, congested=max(found.moved.total - free.moved.total, 0.0))


def _unshared(machine: ClusterCosts, question: RowQuestion) -> str:
    """Why devices make no groups that share layers as the word says; empty where they do."""
    kind, width = question.kind, question.width
    if question.strategy is not None or kind not in SHARING or width == 1:
        return ""
    if question.devices % width:
        return f"{kind.value} takes whole groups of {width}; see --group"
    ways = _ways(machine, kind)
    if width > ways:
        return f"groups of {width} are beyond the {ways} ways in which layers can be split; see --group"
    kinds = machine.graph.kinds.values()
    most = max(degree_of(kind, way) for one in kinds for way in options(one, kind, width, width))
    return "" if most > 1 else f"no layer can be split among {width} GPUs"


def limit_of(machine: ClusterCosts, question: RowQuestion) -> Limit:
    """How many devices a strategy can use."""
    graph, kind = machine.graph, question.kind
    replicas = max(question.samples // question.batch, 1)
    if kind is Method.DATA:
        return Limit(replicas, f"p <= B, and B = {question.batch} p is at most the data set")
    if kind in (Method.PIPELINE, Method.LAYER):
        return Limit(len(graph.layers), f"p <= {len(graph.layers)} layers")
    if kind is Method.SERIAL:
        return Limit(1, "p = 1")
    ways = _ways(machine, kind)
    if kind in HYBRIDS:
        group = min(ways, question.group)
        size = f"groups of {group}" if group == question.group else f"groups of at most {group} (--group)"
        return Limit(replicas * group, f"p <= B x {group}, {size}, B at most the data set")
    return Limit(ways, f"p <= {ways}, the ways in which every layer with convolutions can be split")


def _ways(machine: ClusterCosts, kind: Method) -> int:
    """The most ways, a power of two, in which every kind of layer with convolutions can be split, of those that can."""
    reach = [_most(one, kind) for one in machine.graph.kinds.values() if _has_convolutions(one)]
    return min((most for most in reach if most > 1), default=1)


def _most(layer: LayerKind, kind: Method) -> int:
    """The most ways, a power of two, in which a kind of layer can be split."""
    ways = 1
    while ways < MOST and any(degree_of(kind, one) == 2 * ways for one in options(layer, kind, 2 * ways, 1)):
        ways *= 2
    return ways


def _has_convolutions(layer: LayerKind) -> bool:
    """Whether a kind of layer is what model parallelism of convolutions is for."""
    return any(one.kind is OperatorClass.CONVOLUTION for one in layer.operators)
