"""Whether collectives go over the ranks that the plan puts together for what they are for. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.parallelism.ranks import expert_group, expert_spread_of
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.verify.faithful.layers import Planned
from galvatron_lite.verify.faithful.places import OTHERS, holders_of_experts, line_of, together
from galvatron_lite.verify.match.words import ranks_said, where
from galvatron_lite.verify.schema import Check, Message, RoleRun, Verdict

GROUPS = "groups are the plan's"
_MOST = 12
_SIDES = ("depth", "height", "width")
Ranks = tuple[int, ...]


def groups_fit(runs: Sequence[RoleRun], plan: Plan, graph: ModelGraph) -> Check:
    """Whether every message of a stage goes over ranks that a strategy of the stage puts together for its purpose.

    Args:
        runs: of one rank of each role.
        plan: that they are to have followed.
        graph: of the model.
    """
    planned = Planned(plan, graph)
    wrong = [line for run in runs for line in _wrong(run, planned)]
    if wrong:
        more = f" ({len(wrong)} in all)" if len(wrong) > 1 else ""
        return Check(GROUPS, Verdict.FAILED, wrong[0] + more, tuple(wrong[1:_MOST]))
    return Check(GROUPS, Verdict.PASSED, "Messages go over the groups of ranks that the plan makes.")


def _wrong(run: RoleRun, planned: Planned) -> Iterator[str]:
    names = [name for stage in planned.stages_of(run.stage) for name in planned.stages[stage]]
    strategies = {planned.strategies[name] for name in names}
    legal = {group for strategy in strategies for group in _groups(strategy, run.rank)}
    first: dict[tuple[str, Ranks], Message] = {}
    for one in run.messages:
        first.setdefault((one.purpose, tuple(sorted(one.ranks))), one)
    known = {purpose for purpose, _ in legal} | set(_PURPOSES)
    for (purpose, ranks), one in first.items():
        if purpose in known and (purpose, ranks) not in legal:
            wanted = "; ".join(sorted(ranks_said(own) for other, own in legal if other == purpose)) or "none"
            place = where(run.stage, one)
            yield f"Rank {run.rank} ({place}) uses {ranks_said(ranks)} for {purpose}; the plan's are: {wanted}."


_PURPOSES = ("gradients", "states", "activations", "pixels", "tokens", "experts")
"""Purposes of groups inside a stage (``runtime.mesh``)."""


def _groups(strategy: Strategy, rank: int) -> Iterator[tuple[str, Ranks]]:
    """Purposes and ranks of the groups of one rank under a strategy."""
    shards = [name for name in OTHERS if name != "data"]
    start = rank - rank % strategy.devices
    stage = tuple(range(start, start + strategy.devices))
    yield from (("gradients", together(strategy, rank, OTHERS)), ("gradients", stage), ("activations", stage))
    yield from (("states", together(strategy, rank, shards)), ("states", together(strategy, rank, ("data",))))
    yield from (("tokens", together(strategy, rank, ("context",))),)
    for names in (("tensor",), ("channel",), ("data", "zero")):
        yield "activations", together(strategy, rank, names)
    inner = strategy.slices
    for side in reversed(_SIDES):
        degree = getattr(strategy, side)
        yield "pixels", line_of(strategy.devices, rank, [(inner, degree)])
        inner *= degree
    if strategy.expert > 1:
        yield from _expert_groups(strategy, rank)


def _expert_groups(strategy: Strategy, rank: int) -> Iterator[tuple[str, Ranks]]:
    spread, line = expert_spread_of(strategy), expert_group(strategy)
    yield "experts", line_of(strategy.devices, rank, [(int(line.stride), int(line.size))])
    yield "gradients", holders_of_experts(strategy, rank)
    for group in (spread.shards, spread.replicas):
        yield "states", line_of(strategy.devices, rank, [(int(group.stride), int(group.size))])
