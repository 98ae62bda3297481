"""What travels under ``zero``, where a process keeps nothing. No torch here.

The parameters themselves go along the forward track and are dropped behind it; parameters, gradient sum and optimizer
states go along the backward track, whose last worker makes the update.
"""

from __future__ import annotations

from galvatron_lite.parallelism.cyclic.messages import CyclicMessage, MessageContent
from galvatron_lite.parallelism.cyclic.roster import Roster
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting, version


def weights(roster: Roster, stage: int, number: int) -> list[CyclicMessage]:
    """Along the forward track, from one micro-batch to the next."""
    if number < roster.begin * roster.workers:
        return [one for one in from_home(roster) if one.kind is MessageContent.WEIGHTS and one.stage == stage]
    versions = range(roster.version(stage, number + 1), _newest(roster, stage, number) + 1)
    source, target = roster.process_of(stage, number), roster.process_of(stage, number + 1)
    return [roster.message(MessageContent.WEIGHTS, stage, number, source, target, versions)] if versions else []


def fresh(roster: Roster, stage: int, number: int) -> list[CyclicMessage]:
    """From the pass that made an update to the forward track, where it is next."""
    step = number // roster.workers
    if number != roster.last_of(step):
        return []
    target = roster.process_of(stage, roster.joins(stage, step))
    made = range(step + 1, step + 2)
    return [roster.message(MessageContent.WEIGHTS, stage, number, roster.process_of(stage, number), target, made)]


def completed(roster: Roster, stage: int, number: int) -> int | None:
    """The micro-batch whose update comes to the forward track just before a forward pass."""
    step = number // roster.workers - 1
    joins = step >= roster.begin and number == roster.joins(stage, step)
    return roster.last_of(step) if joins else None


def states(roster: Roster, stage: int, number: int) -> list[CyclicMessage]:
    """Along the backward track, from one micro-batch to the next."""
    if number < roster.begin * roster.workers:
        return [one for one in from_home(roster) if one.kind is MessageContent.STATES and one.stage == stage]
    step = number // roster.workers
    newest = step + 1 if number == roster.last_of(step) else step
    versions = range(roster.version(stage, number + 1), newest + 1)
    source, target = roster.process_of(stage, number), roster.process_of(stage, number + 1)
    return [roster.message(MessageContent.STATES, stage, number, source, target, versions)]


def from_home(roster: Roster) -> list[CyclicMessage]:
    """What leaves the homes of all stages before the first pass."""
    if roster.setting is not CyclicSetting.ZERO:
        return []
    first, found = roster.begin * roster.workers, []
    for stage in range(roster.workers):
        versions = range(roster.version(stage, first), roster.begin + 1)
        for kind in (MessageContent.WEIGHTS, MessageContent.STATES):
            found.append(
                roster.message(kind, stage, first - 1, roster.home(stage), roster.process_of(stage, first), versions)
            )
    return [message for message in found if message.source != message.target]


def _newest(roster: Roster, stage: int, number: int) -> int:
    """The newest version on the forward track at a micro-batch's pass."""
    return max(
        roster.begin, version(CyclicRule.V2, number % roster.workers, stage, roster.workers, number // roster.workers)
    )
