"""Whether collectives go over the ranks that the plan puts together for what they are for."""

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
    """Whether every message of a stage goes over ranks that a strategy of the stage puts together for its purpose."""
    wrong = [line for run in runs for line in _wrong(run, planned)]
    return check_of(GROUPS, wrong, "Messages go over the groups of ranks that the plan makes.")


def _wrong(run: RoleRun, planned: PlannedLayers) -> Iterator[str]:
    strategies = {planned.strategies[name] for name in planned.layers_of(run.stage)}
    legal = {
        (line.purpose.value, line.around(run.rank, strategy.devices))
        for strategy in strategies
        for line in lines_of(strategy)
    }
    first: dict[tuple[str, Ranks], Message] = {}
    for one in run.messages:
        first.setdefault((one.purpose, tuple(sorted(one.ranks))), one)
    for (purpose, ranks), one in first.items():
        if purpose in set(Purpose) and (purpose, ranks) not in legal:
            wanted = "; ".join(sorted(rank_list(members) for other, members in legal if other == purpose)) or "none"
            place = where(run.stage, one)
            yield f"Rank {run.rank} ({place}) uses {rank_list(ranks)} for {purpose}; the plan's are: {wanted}."


GRADIENTS = "gradients are summed"
COPIES = "shared parameters"
"""Purpose of groups that sum the gradients of one parameter that several stages hold."""
_AFTER = (During.BACKWARD, During.WEIGHTS, During.GRADIENTS)


def gradients_summed(runs: Sequence[RoleRun], planned: PlannedLayers) -> Check:
    """Whether all sums that the plan needs were made."""
    wrong = [line for run in runs for line in (*_missing(run, planned), *_apart(run, planned))]
    passed = "Every gradient is summed over all ranks that hold its parameter and see other samples, tokens or pixels."
    return check_of(GRADIENTS, wrong, passed)


def _missing(run: RoleRun, planned: PlannedLayers) -> Iterator[str]:
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
    # those that leave no choice take first what was summed, of more ranks first
    for ranks, scattered in sorted(needed, key=lambda key: (key[1] is None, -len(key[0]))):
        by_layer = needed[ranks, scattered]
        items = sum(by_layer.values())
        if left := items - _take(summed, ranks, scattered, items):
            yield _missing_text(run, by_layer, ranks, left, items)


def _missing_text(run: RoleRun, by_layer: Mapping[str, int], ranks: Ranks, left: int, items: int) -> str:
    alone = [name for name, own in by_layer.items() if own == left]
    names = alone[:1] if len(alone) == 1 else list(by_layer)
    of = names[0] if len(names) == 1 else f"one of {names[0]} .. {names[-1]}"
    return (
        f"Rank {run.rank} (stage {run.stage}): gradients of {of} are not summed over {rank_list(ranks)}: {left:,} of "
        f"{items:,} items are missing, and these ranks hold the same parameters and see other samples."
    )


def _take(sums: dict[tuple[Ranks, bool], int], ranks: Ranks, scattered: bool | None, items: int) -> int:
    taken = 0
    for key in sorted(sums, key=lambda key: len(key[0])):
        if scattered in (None, key[1]) and set(ranks) <= set(key[0]):
            part = min(sums[key], items - taken)
            sums[key] -= part
            taken += part
    return taken


def _summed_items(run: RoleRun) -> dict[tuple[Ranks, bool], int]:
    found: dict[tuple[Ranks, bool], int] = defaultdict(int)
    for message in run.messages:
        reduces = message.kind in (MessageType.ALL_REDUCE, MessageType.REDUCE_SCATTER)
        if reduces and message.phase in _AFTER and message.purpose in ("gradients", "states"):
            items = message.bytes // _SIZES.get(message.dtype, 4) * message.times
            found[tuple(sorted(message.ranks)), message.kind is MessageType.REDUCE_SCATTER] += items
    return found


_SIZES = {"float64": 8, "bfloat16": 2, "float16": 2}
"""Bytes of an item, by dtype; 4 of others. Shapes do not tell items where a scatter's parts are a list."""


Sums = Iterator[tuple[Ranks, bool | None, int]]
"""Sums that a parameter's gradient needs: over which ranks, whether each needs its share of the sum only (ZeRO; None:
either), and items of the gradient in a step."""


def _sums_of(run: RoleRun, one: ParameterSplit, strategy: Strategy, planned: PlannedLayers) -> Sums:
    def around(line: RankLine) -> Ranks:
        return line.around(run.rank, strategy.devices)

    lines = lines_of(strategy)
    states, sharded = lines.states, lines.states.shards.size > 1
    shares = lines.weights.size * (states.shards.size if one.sharded else 1)
    if lines.spread is not None and prod(one.held) * shares < prod(one.whole):  # less than slices and shards leave it
        if not sharded:
            yield around(lines.spread.gradients), False, prod(one.held)
        return
    shards = around(states.shards)
    if not sharded or not (one.sharded or one.updated < prod(one.held)):
        if sharded and one.held[:1] == (1,):  # one row: the first rank may have all of the share
            yield shards, None, prod(one.held)
        else:
            yield around(states.gradients), False, prod(one.held)
        return
    passes = planned.plan.microbatches if one.sharded else 1
    local_items = prod(one.held) if one.sharded else one.updated
    full_items = local_items * len(shards) if one.sharded else prod(one.held)
    # of rows that do not divide evenly, the shares of other ranks are not known from this one's
    if not one.sharded or (one.held and one.whole and one.whole[0] % len(shards) == 0):
        yield shards, True, full_items * passes
        yield around(states.replicas), False, local_items


def _apart(run: RoleRun, planned: PlannedLayers) -> Iterator[str]:
    """Parameters that layers of several groups of devices share: their copies are summed too."""
    here = {split.layer for split in run.splits}
    homes = {name: group for group in range(planned.plan.pipeline) for name in planned.layers_of(group)}
    for tie in planned.graph.ties:
        groups = {homes[tie.first], homes[tie.second]}
        if tie.parameters == tie.frozen or len(groups) == 1 or not here & {tie.first, tie.second}:
            continue
        if not any(message.purpose == COPIES and message.kind is MessageType.ALL_REDUCE for message in run.messages):
            names = f"{tie.first} and {tie.second}"
            yield f"Rank {run.rank} (stage {run.stage}): {names} share parameters, whose gradients are not summed."
