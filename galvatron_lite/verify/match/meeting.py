"""Whether the messages of all ranks of the world meet, as they would on the cluster.

Every rank does what its role was seen to do, with its own groups and partners (``match_places``). A collective happens
once all ranks of its group have come to it, in the order in which each starts those of the group; a message from rank
to rank once both have. A rank starts a message when all that it waited for before have happened: sends wait for their
receivers, as NCCL's may. So what passes here goes on wherever messages are not lost, however little is buffered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from galvatron_lite.plans.schema import Plan
from galvatron_lite.verify.match.places import RankRole, parts_of, script_of
from galvatron_lite.verify.match.replay import Replay, ReplayResult
from galvatron_lite.verify.match.words import (
    deadlock_text,
    mismatch_text,
    missing_group_text,
    rank_list,
    unmatched_text,
)
from galvatron_lite.verify.schema import Check, RoleRun, Verdict

FIT = "messages fit"
PROGRESS = "no rank waits for ever"


def match(runs: Sequence[RoleRun], plan: Plan, *, in_order: bool = True) -> list[Check]:
    """Replay the messages of all ranks.

    Args:
        runs: of one rank of each role.
        plan: that they ran.
        in_order: whether the messages of one group happen one after the other on each rank, those from rank to rank
            that start alone in order with the ones of the same partner, as NCCL runs them; else as gloo does.
    """
    scripts = [script_of(run) for run in runs]
    parts = {part.rank: part for script in scripts for part in parts_of(script, plan.stage_devices)}
    unknown = [rank for rank in range(plan.devices) if rank not in parts]
    if unknown:
        said = f"Of {rank_list(unknown)} it is not known what they do."
        return [Check(name, Verdict.SKIPPED, said) for name in (FIT, PROGRESS)]
    lost = [part for part in parts.values() if None in part.streams]
    if lost:
        return _ended(Check(FIT, Verdict.FAILED, *_lost_text(lost[0])))
    return _verdicts(Replay(parts, in_order=in_order).run(), parts)


def _passed(parts: Mapping[int, RankRole]) -> list[Check]:
    count = sum(len(part.script.messages) for part in parts.values())
    groups = len({stream for part in parts.values() for stream in part.streams})
    return [
        Check(FIT, Verdict.PASSED, f"All {count} messages of {len(parts)} ranks in {groups} groups fit."),
        Check(PROGRESS, Verdict.PASSED, f"All {len(parts)} ranks come to the end of the step."),
    ]


def _verdicts(ended: ReplayResult, parts: Mapping[int, RankRole]) -> list[Check]:
    if ended.clash is not None:
        return _ended(_failed(FIT, mismatch_text(ended)))
    if ended.strangers is not None:
        return _ended(_failed(FIT, missing_group_text(ended)))
    fit, done = _passed(parts)
    if all(actor.ended for actor in ended.actors.values()):
        return [fit, _failed(PROGRESS, unmatched_text(ended)) if ended.open else done]
    return [
        Check(FIT, Verdict.PASSED, "What comes to its partners fits; not all does."),
        _failed(PROGRESS, deadlock_text(ended)),
    ]


def _failed(name: str, told: tuple[str, list[str]]) -> Check:
    return Check(name, Verdict.FAILED, told[0], tuple(told[1]))


def _ended(failed: Check) -> list[Check]:
    return [failed, Check(PROGRESS, Verdict.SKIPPED, "Not known: the messages do not fit.")]


def _lost_text(part: RankRole) -> tuple[str, tuple[str, ...]]:
    """A group that belongs to the place of the recorded rank alone."""
    place = part.streams.index(None)
    purpose, ranks = part.script.groups[place]
    run = part.script.run
    said = f"Rank {run.rank} uses the group of {rank_list(ranks)} ({purpose}); rank {part.rank}, which is to do the "
    return said + "same in its own place, has no such group.", (f"role: {run.role}",)
