"""Whether stages, parameter splits and recomputation are those of the plan.

The ranks that work together follow from the plan's strategies alone (``parallelism.lines``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import cast

from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.model.graph import Layer, LayerKind, ModelGraph, OperatorClass, Recompute, Role, Tie
from galvatron_lite.parallelism.base import DimensionContext, LayerWork
from galvatron_lite.parallelism.layout import layout_of
from galvatron_lite.parallelism.lines import lines_of
from galvatron_lite.parallelism.registry import work_on
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import layer_ranges, pipeline_of
from galvatron_lite.plans.schema import Plan
from galvatron_lite.units import format_bytes
from galvatron_lite.verify.conformance.memory import memory_checks
from galvatron_lite.verify.match.words import first_of, folded
from galvatron_lite.verify.schema import Check, LayerSplit, MessageType, ParameterSplit, RoleRun, Verdict

STAGES = "stages are the plan's"
SPLITS = "layers are split as planned"
KEPT = "activations are kept as planned"
_KEPT_TOLERANCE, _KEPT_SLACK = 0.10, 2**10
"""Share, and bytes (announcements, small buffers), by which what a layer keeps may differ."""
_MOST = 12


@dataclass(frozen=True)
class PlannedLayers:
    """What a plan says about every layer of a model."""

    plan: Plan
    graph: ModelGraph  # of the model

    @property
    def same_precision(self) -> bool:
        """Whether what the graph says layers keep is in the precision that the plan computes in."""
        return self.graph.precision == self.plan.precision

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """By name."""
        return {layer.name: layer for layer in self.graph.layers}

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """Places of each stage's layers in the model, taken in order: a profile of a model by name may call them
        otherwise."""
        return layer_ranges(self.plan)

    @cached_property
    def stages(self) -> list[list[str]]:
        """Names of each stage's layers."""
        names = list(self.layers)
        return [names[inside.start : inside.stop] for inside in self.ranges]

    @cached_property
    def strategies(self) -> dict[str, Strategy]:
        """By the layer's name."""
        runs = [run for stage in self.plan.stages for run in stage.runs]
        chosen = [run.strategy for run in runs for _ in range(run.count)]
        return dict(zip(self.layers, chosen, strict=False))

    def stages_of(self, group: int) -> tuple[int, ...]:
        """Numbers of the stages that a group of devices runs."""
        return pipeline_of(self.plan).stages_of(group)

    def layers_of(self, group: int) -> list[str]:
        """Names of the layers that a group of devices runs."""
        return [name for stage in self.stages_of(group) for name in self.stages[stage]]

    def kind(self, name: str) -> LayerKind:
        """Of a layer."""
        return self.graph.kind_of(self.layers[name])

    def work_of(self, kind: LayerKind, strategy: Strategy) -> LayerWork:
        """What one device does and holds under a strategy; its communications are counted, not sized."""
        context = DimensionContext(
            devices=strategy.devices,
            node_devices=strategy.devices,
            activation_item_bytes=1,
            gather_item_bytes=1,
            parameter_item_bytes=1,
            reduce_item_bytes=1,
            microbatches=self.plan.microbatches,
        )
        return work_on(kind, strategy, self.plan.microbatch, context)

    def kind_on(self, name: str, here: Collection[str]) -> LayerKind:
        """Of a layer on devices that have these: what it shares with one that they have not, it has a copy of."""
        ties = [tie for tie in self.graph.ties if tie.second == name and not self._has_copy(tie, here)]
        return self.kind(name).with_copy(sum(tie.parameters for tie in ties), sum(tie.frozen for tie in ties))

    def _has_copy(self, tie: Tie, here: Collection[str]) -> bool:
        """Whether a layer before the second one of a tie has what they share."""
        alike = [tie.first, *(one.second for one in self.graph.ties if one.first == tie.first)]
        return any(name in here for name in alike[: alike.index(tie.second)])


def layer_checks(runs: Sequence[RoleRun], planned: PlannedLayers, cluster: Cluster | None = None) -> list[Check]:
    """Hold runs against their plan."""
    count = len(planned.plan.stages)
    held = f"All {count} stages hold the plan's layers." if count > 1 else "The one stage holds the plan's layers."
    kept = "Layers keep and recompute what the plan says."
    if not planned.same_precision:
        precisions = f"the model is in {planned.graph.precision}, the plan in {planned.plan.precision}"
        kept = f"Layers recompute what the plan says. Bytes are not compared: {precisions}."
    homes = {rank: run for run in runs for rank in run.ranks}
    return [
        check_of(STAGES, folded(line for run in runs for line in _other_stages(run, planned)), held),
        check_of(
            SPLITS,
            folded(line for run in runs for line in _other_splits(run, homes, planned)),
            "Parameters lie on ranks as the plan says.",
        ),
        check_of(KEPT, folded(line for run in runs for line in _other_kept(run, planned)), kept),
        *memory_checks(runs, planned.plan, cluster),
    ]


def check_of(name: str, wrong: Sequence[str], right: str) -> Check:
    """Failed, with a line for each difference; passed where there are none."""
    if not wrong:
        return Check(name, Verdict.PASSED, right)
    return Check(name, Verdict.FAILED, first_of(wrong), tuple(wrong[1:_MOST]))


def _other_stages(run: RoleRun, planned: PlannedLayers) -> Iterator[str]:
    """Layers that are not the plan's, or never run; and what is sent on, which comes from the last layer of a stage."""
    here = f"Rank {run.rank} (stage {run.stage})"
    wanted, names = planned.layers_of(run.stage), [split.layer for split in run.splits]
    if names != wanted:
        yield f"{here} {_differing(names, wanted)}."
    for split in run.splits:
        if not split.forwards and split.layer in planned.layers and planned.layers[split.layer].modules:
            yield f"{here} holds {split.layer} and never runs it."
    last = {name for stage in planned.stages_of(run.stage) for name in _ends(planned, stage)}
    sent = [one for one in run.messages if one.kind is MessageType.SEND and one.purpose == "pipeline forward"]
    for layer in dict.fromkeys(one.layer for one in sent if one.layer and one.layer not in last):
        yield f"{here} sends on behind {layer}; the plan's stage ends behind {' or '.join(sorted(last))}."


def _differing(names: Sequence[str], wanted: Sequence[str]) -> str:
    extra, missing = [n for n in names if n not in wanted], [n for n in wanted if n not in names]
    parts = [f"has {', '.join(extra)}"] * bool(extra) + [f"has not {', '.join(missing)}"] * bool(missing)
    what = " and ".join(parts) or "has its layers in another order"
    this = f"{names[0]} to {names[-1]}" if names else "nothing"
    return f"{what}: the plan's stage is {wanted[0]} to {wanted[-1]}, this one {this}"


def _ends(planned: PlannedLayers, stage: int) -> list[str]:
    """Behind which layers a stage may be seen to end: one without blocks ends where the next one's first begins."""
    last, stop = planned.stages[stage][-1], planned.ranges[stage].stop
    following = list(planned.layers)[stop : stop + 1] if planned.layers[last].role is not Role.BLOCK else []
    return [last, *following]


def _other_splits(run: RoleRun, homes: Mapping[int, RoleRun], planned: PlannedLayers) -> Iterator[str]:
    splits = [split for split in run.splits if split.layer in planned.strategies]
    degrees = {planned.strategies[split.layer].batch_degree for split in splits}
    for split in splits:
        strategy = planned.strategies[split.layer]
        where = f"{split.layer} on rank {run.rank} (stage {run.stage}), planned {strategy}"
        samples = planned.plan.microbatch // strategy.batch_degree
        other = bool(split.taken) and split.taken[0] != samples
        # where degrees differ, a layer may be given what lies as a neighbour has it
        if other and len(degrees) == 1 and planned.layers[split.layer].role is Role.BLOCK:
            yield f"{where}: it is given a tensor {split.taken}, not {samples} samples."
        if split.parameters:
            yield from (f"{where}: {line}" for line in _other_split(run, split, homes, planned))


def _other_split(
    run: RoleRun, split: LayerSplit, homes: Mapping[int, RoleRun], planned: PlannedLayers
) -> Iterator[str]:
    strategy = planned.strategies[split.layer]
    lines = lines_of(strategy)
    unknown = lines.channels.size > 1  # of which the graph says nothing
    if unknown or (lines.spread is not None and lines.states.shards.size > 1):
        return
    # a layer that shares parameters with one that is not on these devices has a copy of its own
    wanted = planned.work_of(planned.kind_on(split.layer, {split.layer for split in run.splits}), strategy).parameters
    sharded = any(parameter.sharded for parameter in split.parameters)
    if sharded != (strategy.parameter_shards > 1):
        yield f"its parameters are {'' if sharded else 'not '}shared out over ranks."
        return
    around = lines.weights.around(run.rank, strategy.devices)
    ranks = [rank for rank in around if rank in homes]
    sums = [_held_together(rank, split.layer, homes, planned) for rank in ranks]
    # tensor ranks may have unequal parts of what does not divide evenly, but together all of it
    held, updated = (sum(one) / len(ranks) for one in zip(*sums, strict=True))
    if round(held) != round(wanted):
        yield f"{'its ranks hold' if sharded else 'the rank holds'} {held:,.0f} items, not {round(wanted):,}."
    if round(updated) < round(wanted):
        yield f"of {round(wanted):,} items only {updated:,.0f} are updated."


def _held_together(rank: int, layer: str, homes: Mapping[int, RoleRun], planned: PlannedLayers) -> tuple[int, int]:
    strategy, run = planned.strategies[layer], homes[rank]
    members = lines_of(strategy).states.shards.around(rank, strategy.devices)
    splits = [own for member in members if member in homes and (own := _split_of(homes[member], layer)) is not None]
    place = lines_of(strategy).states.shards.index(run.rank % strategy.devices)
    alone = len({homes[member].rank for member in members if member in homes}) == 1
    held = updated = 0
    for parameter in (_split_of(run, layer) or LayerSplit(layer, (), (), 0)).parameters:
        same = [other for split in splits for other in split.parameters if other.name == parameter.name]
        if parameter.sharded and alone and _is_uneven_share(parameter, place, len(members)):
            held, updated = held + prod(parameter.used), updated + prod(parameter.used)
            continue
        once = not parameter.sharded or _stays(parameter, strategy, planned.layers[layer])
        held += prod(parameter.held) if once else sum(prod(other.held) for other in same)
        updated += sum(other.updated for other in same)
    return held, updated


def _is_uneven_share(one: ParameterSplit, place: int, shards: int) -> bool:
    """Whether what a rank holds is its share of rows that do not divide evenly: ranks before the last have as many."""
    rows = one.used[0] if one.used else 0
    most = -(-rows // shards)
    return rows % shards > 0 and one.held[:1] == (max(min(rows - place * most, most), 0),)


def _stays(one: ParameterSplit, strategy: Strategy, layer: Layer) -> bool:
    """Whether a parameter is not shared out: no module of the layer holds it, or all slices have it whole."""
    inside = any(one.name.startswith(f"{path}.") for path in layer.modules)
    return not inside or (layout_of(strategy).sequence > 1 and not one.sharded and one.held == one.whole)


def _split_of(run: RoleRun, layer: str) -> LayerSplit | None:
    return next((split for split in run.splits if split.layer == layer), None)


def _other_kept(run: RoleRun, planned: PlannedLayers) -> Iterator[str]:
    for split in run.splits:
        layer = planned.layers.get(split.layer)
        if layer is not None and layer.role is Role.BLOCK:
            where = f"{layer.name} on rank {run.rank} (stage {run.stage})"
            kind, strategy = planned.kind(layer.name), planned.strategies[layer.name]
            work = planned.work_of(kind, strategy)
            again = cast(Recompute, work.recompute)  # of one strategy
            times = planned.plan.microbatches
            wanted = {Recompute.NONE: times, Recompute.FULL: 2 * times}.get(again, split.forwards)
            if split.forwards not in (0, wanted):
                ran = f"runs forward {split.forwards} times in a step"
                yield f"{where} {ran}; with {_again(again)}, as planned, {wanted}."
            if planned.same_precision and layer.name in run.kept:
                yield from (f"{where} {line}" for line in _other_bytes(layer.name, run.kept[layer.name], work, planned))


def _other_bytes(name: str, kept: int, work: LayerWork, planned: PlannedLayers) -> Iterator[str]:
    kind, lines = planned.kind(name), lines_of(planned.strategies[name])
    exact = not lines.uneven and not kind.expert_parameters
    lent = any(tensor.borrowed for tensor in planned.graph.tensors)
    exact &= not (lent and lines.tokens.size > 1)  # copies of what an encoder gave come together there
    if work.host_kept or work.gathered_items or not exact:  # gathered parameters are seen as kept
        return
    samples, again = work.samples, cast(Recompute, work.recompute)
    choices = {one: samples * split.at(work.tensor, work.sequence_parallel) for one, split in kind.kept.items()}
    wanted = float(choices[again])
    less, more = _ends_apart(name, planned)
    less += _in_steps(kind) * samples
    # a bias that later layers read, too (T5's), outlasts recomputation
    more += samples * (kind.kept[Recompute.NONE].total - kind.kept[again].total) * lent
    slack = _KEPT_TOLERANCE * wanted + _KEPT_SLACK
    if wanted - less - slack <= kept <= wanted + more + slack:
        return
    near = min(choices, key=lambda one: abs(float(choices[one]) - kept))
    like = f", as with {_again(near)}" if near is not again else ""
    yield (
        f"keeps {format_bytes(kept)} of a micro-batch{like}; with {_again(again)}, as planned, it keeps "
        f"{format_bytes(wanted)}."
    )


def _in_steps(kind: LayerKind) -> int:
    """Bytes a sample that norms keep where they are captured in steps, and not in a kernel of an accelerator.

    What multiplies by weights, item by item, is taken to be one, by whatever name the model calls it.
    """
    memory = [
        (operator.name.rpartition(".")[0], operator)
        for operator in kind.operators
        if operator.kind is OperatorClass.MEMORY
    ]
    norms = {name: operator for name, operator in memory if "norm" in name or (operator.weight_bytes and name)}
    return sum(4 * operator.shape[0] for operator in norms.values())


def _ends_apart(name: str, planned: PlannedLayers) -> tuple[float, float]:
    """Bytes by which what a layer is seen to keep may be below and above what it keeps by itself.

    A layer is seen to keep what it makes: what it returns, and not what it is given. In a chain of equal tensors that
    is as much, where the next one keeps it, and it what it is given: not where nothing before it trains. Beside another
    layout it makes a copy of what it is given, which it keeps, and its neighbour keeps one of what it returns; where
    tensors differ, or go past layers, what comes in and goes out may count or not.
    """
    names, graph, strategy = list(planned.layers), planned.graph, planned.strategies[name]
    place = names.index(name)
    shares = layout_of(strategy).devices // layout_of(strategy).copies
    entering, leaving = (graph.crossing(cut) * planned.plan.microbatch / shares for cut in (place, place + 1))
    if entering != leaving or any(len(tensor.readers) > 1 for tensor in graph.tensors):
        return max(entering, leaving), max(entering, leaving)
    before, after = (
        layout_of(planned.strategies[names[side]]) != layout_of(strategy) for side in (place - 1, place + 1)
    )
    last = planned.layers[names[place + 1]].role is not Role.BLOCK  # which may keep nothing (a mean)
    first = not planned.kind(names[place - 1]).returns
    return leaving * (after or last), entering * (before or first)


def _again(choice: Recompute) -> str:
    return "nothing computed again" if choice is Recompute.NONE else f"{choice.value} recomputation"
