"""Check that stages, splits of parameters, kept activations and recomputation are those of the plan.

Which ranks work together follows from the plan's strategies alone (``parallelism.lines``).
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
_KEPT_TOLERANCE = 0.10
_KEPT_SLACK = 2**10
"""Share, and bytes (announcements, small buffers), by which the activations that a layer keeps may differ."""
_MOST = 12  # differences that a check lists


@dataclass(frozen=True)
class PlannedLayers:
    """The layers of a model with their stages and strategies in a plan.

    Plans and graphs may name layers differently, so layers correspond by their order.
    """

    plan: Plan
    graph: ModelGraph

    @property
    def same_precision(self) -> bool:
        """Whether the graph's bytes are in the precision that the plan computes in."""
        return self.graph.precision == self.plan.precision

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """Layers of the graph by name, in order."""
        return {layer.name: layer for layer in self.graph.layers}

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """Indices of each stage's layers."""
        return layer_ranges(self.plan)

    @cached_property
    def stages(self) -> list[list[str]]:
        """Names of each stage's layers."""
        names = list(self.layers)
        return [names[indices.start : indices.stop] for indices in self.ranges]

    @cached_property
    def strategies(self) -> dict[str, Strategy]:
        """Strategies by the layer's name."""
        runs = [run for stage in self.plan.stages for run in stage.runs]
        strategies = [run.strategy for run in runs for _ in range(run.count)]
        return dict(zip(self.layers, strategies, strict=False))

    def stages_of(self, group: int) -> tuple[int, ...]:
        """Return the numbers of the stages that a group of devices runs."""
        return pipeline_of(self.plan).stages_of(group)

    def layers_of(self, group: int) -> list[str]:
        """Return the names of the layers that a group of devices runs."""
        return [name for stage in self.stages_of(group) for name in self.stages[stage]]

    def kind(self, name: str) -> LayerKind:
        """Return the kind of a layer."""
        return self.graph.kind_of(self.layers[name])

    def work_of(self, kind: LayerKind, strategy: Strategy) -> LayerWork:
        """Return what one device does and holds under a strategy; its communications have counts, but no sizes."""
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

    def kind_on(self, name: str, local_layers: Collection[str]) -> LayerKind:
        """Return the kind of a layer on devices that hold ``local_layers``.

        It includes copies of parameters that the layer shares with layers that are not local.
        """
        ties = [tie for tie in self.graph.ties if tie.second == name and not self._has_copy(tie, local_layers)]
        return self.kind(name).with_copy(sum(tie.parameters for tie in ties), sum(tie.frozen for tie in ties))

    def _has_copy(self, tie: Tie, local_layers: Collection[str]) -> bool:
        """Whether a local layer before the second one of a tie holds the shared parameters."""
        sharing = [tie.first, *(other.second for other in self.graph.ties if other.first == tie.first)]
        return any(name in local_layers for name in sharing[: sharing.index(tie.second)])


def layer_checks(runs: Sequence[RoleRun], planned: PlannedLayers, cluster: Cluster | None = None) -> list[Check]:
    """Check the layers, splits, activations and memory of runs against the plan."""
    count = len(planned.plan.stages)
    same_layers = f"All {count} stages hold" if count > 1 else "The one stage holds"
    kept = "Layers keep and recompute what the plan says."
    if not planned.same_precision:
        precisions = f"the model is in {planned.graph.precision}, the plan in {planned.plan.precision}"
        kept = f"Layers recompute what the plan says. Bytes are not compared: {precisions}."
    run_of = {rank: run for run in runs for rank in run.ranks}
    stage_lines = folded(line for run in runs for line in _stage_differences(run, planned))
    split_lines = folded(line for run in runs for line in _split_differences(run, run_of, planned))
    kept_lines = folded(line for run in runs for line in _kept_differences(run, planned))
    return [
        check_of(STAGES, stage_lines, f"{same_layers} the plan's layers."),
        check_of(SPLITS, split_lines, "Parameters lie on ranks as the plan says."),
        check_of(KEPT, kept_lines, kept),
        *memory_checks(runs, planned.plan, cluster),
    ]


def check_of(name: str, differences: Sequence[str], passed: str) -> Check:
    """Return a check that failed with these differences; without any, one that passed with the text ``passed``."""
    if not differences:
        return Check(name, Verdict.PASSED, passed)
    return Check(name, Verdict.FAILED, first_of(differences), tuple(differences[1:_MOST]))


def _stage_differences(run: RoleRun, planned: PlannedLayers) -> Iterator[str]:
    """Yield lines on layers that are not the plan's or never run, and on sends from the middle of a stage."""
    rank = f"Rank {run.rank} (stage {run.stage})"
    expected, names = planned.layers_of(run.stage), [split.layer for split in run.splits]
    if names != expected:
        yield f"{rank} {_compare_layers(names, expected)}."
    for split in run.splits:
        if not split.forwards and split.layer in planned.layers and planned.layers[split.layer].modules:
            yield f"{rank} holds {split.layer} and never runs it."
    last = {name for stage in planned.stages_of(run.stage) for name in _last_layers(planned, stage)}
    sends = [message for message in run.messages if message.kind is MessageType.SEND]
    senders = dict.fromkeys(message.layer for message in sends if message.purpose == "pipeline forward")
    for layer in (layer for layer in senders if layer and layer not in last):
        yield f"{rank} sends on behind {layer}; the plan's stage ends behind {' or '.join(sorted(last))}."


def _compare_layers(names: Sequence[str], expected: Sequence[str]) -> str:
    extra, missing = [n for n in names if n not in expected], [n for n in expected if n not in names]
    parts = [f"has {', '.join(extra)}"] * bool(extra) + [f"has not {', '.join(missing)}"] * bool(missing)
    difference = " and ".join(parts) or "has its layers in another order"
    actual = f"{names[0]} to {names[-1]}" if names else "nothing"
    return f"{difference}: the plan's stage is {expected[0]} to {expected[-1]}, this one {actual}"


def _last_layers(planned: PlannedLayers, stage: int) -> list[str]:
    """Return the layers that may be recorded last: one that is no block ends only when the next one begins."""
    last, stop = planned.stages[stage][-1], planned.ranges[stage].stop
    following = list(planned.layers)[stop : stop + 1] if planned.layers[last].role is not Role.BLOCK else []
    return [last, *following]


def _split_differences(run: RoleRun, run_of: Mapping[int, RoleRun], planned: PlannedLayers) -> Iterator[str]:
    splits = [split for split in run.splits if split.layer in planned.strategies]
    degrees = {planned.strategies[split.layer].batch_degree for split in splits}
    for split in splits:
        strategy = planned.strategies[split.layer]
        layer = f"{split.layer} on rank {run.rank} (stage {run.stage}), planned {strategy}"
        samples = planned.plan.microbatch // strategy.batch_degree
        other_input = bool(split.taken) and split.taken[0] != samples
        # if degrees differ, the input may still be in the layout of a neighbour
        if other_input and len(degrees) == 1 and planned.layers[split.layer].role is Role.BLOCK:
            yield f"{layer}: it is given a tensor {split.taken}, not {samples} samples."
        if split.parameters:
            yield from (f"{layer}: {line}" for line in _parameter_differences(run, split, run_of, planned))


def _parameter_differences(
    run: RoleRun, split: LayerSplit, run_of: Mapping[int, RoleRun], planned: PlannedLayers
) -> Iterator[str]:
    strategy = planned.strategies[split.layer]
    lines = lines_of(strategy)
    # the graph does not say which parameters channels split
    if lines.channels.size > 1 or (lines.spread is not None and lines.states.shards.size > 1):
        return
    # a layer that shares parameters with one on other devices has a copy of them
    expected = planned.work_of(planned.kind_on(split.layer, {split.layer for split in run.splits}), strategy).parameters
    sharded = any(parameter.sharded for parameter in split.parameters)
    if sharded != (strategy.parameter_shards > 1):
        yield f"its parameters are {'' if sharded else 'not '}shared out over ranks."
        return
    ranks = [rank for rank in lines.weights.around(run.rank, strategy.devices) if rank in run_of]
    sums = [_count_items(rank, split.layer, run_of, planned) for rank in ranks]
    # tensor ranks may hold unequal slices of a size that does not divide, so compare their mean
    held, updated = (sum(counts) / len(ranks) for counts in zip(*sums, strict=True))
    if round(held) != round(expected):
        yield f"{'its ranks hold' if sharded else 'the rank holds'} {held:,.0f} items, not {round(expected):,}."
    if round(updated) < round(expected):
        yield f"of {round(expected):,} items only {updated:,.0f} are updated."


def _count_items(rank: int, layer: str, run_of: Mapping[int, RoleRun], planned: PlannedLayers) -> tuple[int, int]:
    """Return the items of a layer that a rank and the others with shards of the same parameters hold, and update."""
    strategy, run = planned.strategies[layer], run_of[rank]
    shards = lines_of(strategy).states.shards
    members = shards.around(rank, strategy.devices)
    member_runs = [run_of[member] for member in members if member in run_of]
    splits = [split for member_run in member_runs if (split := _split_of(member_run, layer)) is not None]
    index = shards.index(run.rank % strategy.devices)
    one_role = len({member_run.rank for member_run in member_runs}) == 1
    held = updated = 0
    for parameter in (_split_of(run, layer) or LayerSplit(layer, (), (), 0)).parameters:
        copies = [other for split in splits for other in split.parameters if other.name == parameter.name]
        if parameter.sharded and one_role and _is_uneven_shard(parameter, index, len(members)):
            held, updated = held + prod(parameter.used), updated + prod(parameter.used)
            continue
        unsharded = not parameter.sharded or _is_replicated(parameter, strategy, planned.layers[layer])
        held += prod(parameter.held) if unsharded else sum(prod(other.held) for other in copies)
        updated += sum(other.updated for other in copies)
    return held, updated


def _is_uneven_shard(parameter: ParameterSplit, index: int, shards: int) -> bool:
    """Whether a rank holds its shard of rows that do not divide evenly: all before the last have the same number."""
    rows = parameter.used[0] if parameter.used else 0
    shard_rows = -(-rows // shards)
    return rows % shards > 0 and parameter.held[:1] == (max(min(rows - index * shard_rows, shard_rows), 0),)


def _is_replicated(parameter: ParameterSplit, strategy: Strategy, layer: Layer) -> bool:
    """Whether a parameter is not sharded: no module of the layer holds it, or sequence ranks each hold all of it."""
    inside = any(parameter.name.startswith(f"{path}.") for path in layer.modules)
    complete = not parameter.sharded and parameter.held == parameter.whole
    return not inside or (layout_of(strategy).sequence > 1 and complete)


def _split_of(run: RoleRun, layer: str) -> LayerSplit | None:
    return next((split for split in run.splits if split.layer == layer), None)


def _kept_differences(run: RoleRun, planned: PlannedLayers) -> Iterator[str]:
    microbatches = planned.plan.microbatches
    for split in run.splits:
        layer = planned.layers.get(split.layer)
        if layer is None or layer.role is not Role.BLOCK:
            continue
        rank = f"{layer.name} on rank {run.rank} (stage {run.stage})"
        work = planned.work_of(planned.kind(layer.name), planned.strategies[layer.name])
        recompute = cast(Recompute, work.recompute)  # not an array: it is the work of one strategy
        expected = {Recompute.NONE: microbatches, Recompute.FULL: 2 * microbatches}.get(recompute, split.forwards)
        if split.forwards not in (0, expected):
            forwards = f"runs forward {split.forwards} times in a step"
            yield f"{rank} {forwards}; with {_describe(recompute)}, as planned, {expected}."
        if planned.same_precision and layer.name in run.kept:
            yield from (f"{rank} {line}" for line in _byte_differences(layer.name, run.kept[layer.name], work, planned))


def _byte_differences(name: str, kept: int, work: LayerWork, planned: PlannedLayers) -> Iterator[str]:
    kind, lines = planned.kind(name), lines_of(planned.strategies[name])
    borrows = any(tensor.borrowed for tensor in planned.graph.tensors)
    # token ranks gather copies of an encoder's output; gathered parameters count as kept
    inexact = lines.uneven or kind.expert_parameters or (borrows and lines.tokens.size > 1)
    if inexact or work.host_kept or work.gathered_items:
        return
    samples, recompute = work.samples, cast(Recompute, work.recompute)
    tensor, sequence = work.tensor, work.sequence_parallel
    bytes_by_choice = {choice: samples * split.at(tensor, sequence) for choice, split in kind.kept.items()}
    expected = float(bytes_by_choice[recompute])
    below, above = _boundary_bytes(name, planned)
    below += _norm_bytes(kind) * samples
    # a bias that later layers read, too (T5's), outlasts recomputation
    above += samples * (kind.kept[Recompute.NONE].total - kind.kept[recompute].total) * borrows
    slack = _KEPT_TOLERANCE * expected + _KEPT_SLACK
    if expected - below - slack <= kept <= expected + above + slack:
        return
    nearest = min(bytes_by_choice, key=lambda choice: abs(float(bytes_by_choice[choice]) - kept))
    hint = f", as with {_describe(nearest)}" if nearest is not recompute else ""
    yield (
        f"keeps {format_bytes(kept)} of a micro-batch{hint}; with {_describe(recompute)}, as planned, it keeps "
        f"{format_bytes(expected)}."
    )


def _norm_bytes(kind: LayerKind) -> int:
    """Return the bytes per sample that norms keep if they are captured as several operators, not as one kernel.

    Every elementwise product with weights counts as a norm, whatever the model calls it.
    """
    rows: dict[str, int] = {}
    for operator in kind.operators:
        module = operator.name.rpartition(".")[0]
        if operator.kind is OperatorClass.MEMORY and ("norm" in module or (operator.weight_bytes and module)):
            rows[module] = operator.shape[0]
    return 4 * sum(rows.values())


def _boundary_bytes(name: str, planned: PlannedLayers) -> tuple[float, float]:
    """Return the bytes by which a layer's measured activations may be below and above its planned ones.

    Measured are tensors that the layer makes: its output counts and its input does not. In a chain of equal tensors
    both are the same size, if the next layer keeps the output and this one the input, which it does not if no layer
    before it trains. Next to another layout this layer keeps a copy of its input, and the neighbour a copy of its
    output. If tensors differ in size or skip layers, inputs and outputs may count or not.
    """
    names, graph, strategy = list(planned.layers), planned.graph, planned.strategies[name]
    index = names.index(name)
    shares = layout_of(strategy).devices // layout_of(strategy).copies
    entering, leaving = (graph.crossing(cut) * planned.plan.microbatch / shares for cut in (index, index + 1))
    if entering != leaving or any(len(tensor.readers) > 1 for tensor in graph.tensors):
        return max(entering, leaving), max(entering, leaving)
    before, after = (
        layout_of(planned.strategies[names[neighbour]]) != layout_of(strategy) for neighbour in (index - 1, index + 1)
    )
    last = planned.layers[names[index + 1]].role is not Role.BLOCK  # which may keep nothing (a mean)
    first = not planned.kind(names[index - 1]).returns
    return leaving * (after or last), entering * (before or first)


def _describe(choice: Recompute) -> str:
    return "nothing computed again" if choice is Recompute.NONE else f"{choice.value} recomputation"
