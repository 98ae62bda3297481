"""Checks of process groups: messages use those of the plan, and gradients are summed over all ranks that need it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from galvatron_lite.parallelism.axes import Purpose, RankLine
from galvatron_lite.parallelism.lines import lines_of
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.verify.conformance.layers import PlannedLayers, check_of
from galvatron_lite.verify.match.words import rank_list, where
from galvatron_lite.verify.schema import Check, During, Message, MessageType, ParameterSplit, RoleRun

GROUPS = "groups are the plan's"
Ranks = tuple[int, ...]


def groups_fit(runs: Sequence[RoleRun], planned: PlannedLayers) -> Check:
    """Check that every message of a stage uses a group that a strategy of the stage forms for its purpose."""
    differences = [line for run in runs for line in _unplanned_groups(run, planned)]
    return check_of(GROUPS, differences, "Messages go over the groups of ranks that the plan makes.")


def _unplanned_groups(run: RoleRun, planned: PlannedLayers) -> Iterator[str]:
    strategies = {planned.strategies[name] for name in planned.layers_of(run.stage)}
    planned_groups = {
        (line.purpose.value, line.around(run.rank, strategy.devices))
        for strategy in strategies
        for line in lines_of(strategy)
    }
    first_messages: dict[tuple[str, Ranks], Message] = {}
    for message in run.messages:
        first_messages.setdefault((message.purpose, tuple(sorted(message.ranks))), message)
    for (purpose, ranks), message in first_messages.items():
        if purpose in set(Purpose) and (purpose, ranks) not in planned_groups:
            same_purpose = sorted(rank_list(members) for other, members in planned_groups if other == purpose)
            place, expected = where(run.stage, message), "; ".join(same_purpose) or "none"
            yield f"Rank {run.rank} ({place}) uses {rank_list(ranks)} for {purpose}; the plan's are: {expected}."


GRADIENTS = "gradients are summed"
COPIES = "shared parameters"
"""Purpose of groups that sum the gradients of a parameter that several stages hold."""
_SUMMING_PHASES = (During.BACKWARD, During.WEIGHTS, During.GRADIENTS)


def gradients_summed(runs: Sequence[RoleRun], planned: PlannedLayers) -> Check:
    """Check that all sums of gradients that the plan needs were made."""
    differences = [line for run in runs for line in (*_missing_sums(run, planned), *_unsummed_copies(run, planned))]
    passed = "Every gradient is summed over all ranks that hold its parameter and see other samples, tokens or pixels."
    return check_of(GRADIENTS, differences, passed)


def _missing_sums(run: RoleRun, planned: PlannedLayers) -> Iterator[str]:
    needed: dict[tuple[Ranks, bool | None], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for split in run.splits:
        strategy = planned.strategies.get(split.layer)
        for parameter in split.parameters:
            if strategy is None or not parameter.trains:
                continue
            for ranks, scattered, items in _sums_of(run, parameter, strategy, planned):
                if len(ranks) > 1:
                    needed[ranks, scattered][split.layer] += items
    summed = _summed_items(run)
    # sums that only one kind of message can make come first; of those, the ones over more ranks
    for ranks, scattered in sorted(needed, key=lambda key: (key[1] is None, -len(key[0]))):
        by_layer = needed[ranks, scattered]
        items = sum(by_layer.values())
        if missing := items - _take(summed, ranks, scattered, items):
            yield _missing_text(run, by_layer, ranks, missing, items)


def _missing_text(run: RoleRun, by_layer: Mapping[str, int], ranks: Ranks, missing: int, items: int) -> str:
    suspects = [name for name, layer_items in by_layer.items() if layer_items == missing]
    names = suspects if len(suspects) == 1 else list(by_layer)
    layers = names[0] if len(names) == 1 else f"one of {names[0]} .. {names[-1]}"
    return (
        f"Rank {run.rank} (stage {run.stage}): gradients of {layers} are not summed over {rank_list(ranks)}: "
        f"{missing:,} of {items:,} items are missing, and these ranks hold the same parameters and see other samples."
    )


def _take(sums: dict[tuple[Ranks, bool], int], ranks: Ranks, scattered: bool | None, items: int) -> int:
    """Take up to so many items from sums over at least these ranks, of fewest ranks first; return how many."""
    taken = 0
    for key in sorted(sums, key=lambda key: len(key[0])):
        if scattered in (None, key[1]) and set(ranks) <= set(key[0]):
            part = min(sums[key], items - taken)
            sums[key] -= part
            taken += part
    return taken


def _summed_items(run: RoleRun) -> dict[tuple[Ranks, bool], int]:
    """Return items of gradients that were summed, by ranks and whether each rank got its share only."""
    summed: dict[tuple[Ranks, bool], int] = defaultdict(int)
    for message in run.messages:
        reduces = message.kind in (MessageType.ALL_REDUCE, MessageType.REDUCE_SCATTER)
        if reduces and message.phase in _SUMMING_PHASES and message.purpose in ("gradients", "states"):
            items = message.bytes // _SIZES.get(message.dtype, 4) * message.times
            summed[tuple(sorted(message.ranks)), message.kind is MessageType.REDUCE_SCATTER] += items
    return summed


_SIZES = {"float64": 8, "bfloat16": 2, "float16": 2}
"""Bytes of an item, by dtype; 4 of others. Shapes do not show items of a scatter whose parts are a list."""


Sums = Iterator[tuple[Ranks, bool | None, int]]
"""Sums of a parameter's gradient: the ranks, whether each gets its share only (ZeRO; None: either), items a step."""


def _sums_of(run: RoleRun, split: ParameterSplit, strategy: Strategy, planned: PlannedLayers) -> Sums:
    def around(line: RankLine) -> Ranks:
        return line.around(run.rank, strategy.devices)

    lines = lines_of(strategy)
    states, sharded = lines.states, lines.states.shards.size > 1
    shares = lines.weights.size * (states.shards.size if split.sharded else 1)
    if lines.spread is not None and prod(split.held) * shares < prod(split.whole):  # smaller than a slice or shard
        if not sharded:
            yield around(lines.spread.gradients), False, prod(split.held)
        return
    shards = around(states.shards)
    if not sharded or not (split.sharded or split.updated < prod(split.held)):
        if sharded and split.held[:1] == (1,):  # the first rank may get all of a single row
            yield shards, None, prod(split.held)
        else:
            yield around(states.gradients), False, prod(split.held)
        return
    passes = planned.plan.microbatches if split.sharded else 1
    local_items = prod(split.held) if split.sharded else split.updated
    full_items = local_items * len(shards) if split.sharded else prod(split.held)
    # shares of other ranks are not known where rows do not divide evenly
    if not split.sharded or (split.held and split.whole and split.whole[0] % len(shards) == 0):
        yield shards, True, full_items * passes
        yield around(states.replicas), False, local_items


def _unsummed_copies(run: RoleRun, planned: PlannedLayers) -> Iterator[str]:
    """Find parameters that layers of several groups of devices share, and whose gradients are not summed."""
    local_layers = {split.layer for split in run.splits}
    group_of = {name: group for group in range(planned.plan.pipeline) for name in planned.layers_of(group)}
    for tie in planned.graph.ties:
        groups = {group_of[tie.first], group_of[tie.second]}
        if tie.parameters == tie.frozen or len(groups) == 1 or not local_layers & {tie.first, tie.second}:
            continue
        if not any(message.purpose == COPIES and message.kind is MessageType.ALL_REDUCE for message in run.messages):
            names = f"{tie.first} and {tie.second}"
            yield f"Rank {run.rank} (stage {run.stage}): {names} share parameters, whose gradients are not summed."
