"""Messages of a pass: what a stage hands on, its gradient sums and updates. No torch here.

Each function says what arrives before a pass of micro-batch ``number``, or what leaves after it (``arriving``). What
goes round (arXiv 2403.08837 has the rule; how it travels is ours):

- On the backward track the sum of a stage's gradients goes from worker to worker, one at each backward pass. The last
  worker has the whole sum.
- On the forward track that sum goes to the other processes of the stage, in the order in which their micro-batches
  first need what it gives: each gets it from the one before, when that one runs its forward pass (the first one, where
  the pass before is not the last worker's, at once). So a process sends one stage at a time, never needs a second
  version, and each applies the same gradient.
- Under ``zero`` parameters and states travel instead: ``zero_tracks``.
"""

from __future__ import annotations

from galvatron_lite.parallelism.cyclic.messages import CyclicMessage, MessageContent
from galvatron_lite.parallelism.cyclic.roster import Roster
from galvatron_lite.parallelism.cyclic.rules import CyclicSetting
from galvatron_lite.parallelism.cyclic.zero_tracks import completed, fresh, states, weights


def activations(roster: Roster, stage: int, number: int, arriving: bool) -> list[CyclicMessage]:
    """What the stage before made of a micro-batch; what this one makes of it, for the next."""
    made = stage - 1 if arriving else stage
    if made < 0 or made == roster.workers - 1:
        return []
    source, target = roster.process_of(made, number), roster.process_of(made + 1, number)
    return [roster.message(MessageContent.ACTIVATION, made, number, source, target)]


def gradients(roster: Roster, stage: int, number: int, arriving: bool) -> list[CyclicMessage]:
    """Of what the stage made, from the next one; of what it was given, for the one before."""
    made = stage + 1 if arriving else stage
    if made == 0 or made == roster.workers:
        return []
    source, target = roster.process_of(made, number), roster.process_of(made - 1, number)
    return [roster.message(MessageContent.GRADIENT, made, number, source, target)]


def backward_track(roster: Roster, stage: int, number: int, arriving: bool) -> list[CyclicMessage]:
    """What goes from one backward pass of a stage to the next, and from the last one to the forward track."""
    made = number - 1 if arriving else number
    if roster.setting is CyclicSetting.ZERO:
        return states(roster, stage, made) + ([] if arriving else fresh(roster, stage, number))
    if made % roster.workers == roster.workers - 1:
        return [] if arriving else _first_update(roster, stage, number)
    source, target = roster.process_of(stage, made), roster.process_of(stage, made + 1)
    return [roster.message(MessageContent.PARTIAL, stage, made, source, target)]


def forward_track(roster: Roster, stage: int, number: int, arriving: bool) -> list[CyclicMessage]:
    """What goes from one forward pass of a stage to the next, and what comes to it from the backward track."""
    if roster.setting is CyclicSetting.ZERO:
        passed = weights(roster, stage, number - 1 if arriving else number)
        complete = completed(roster, stage, number) if arriving else None
        return passed if complete is None else passed + fresh(roster, stage, complete)
    return _arriving_update(roster, stage, number) if arriving else _passed_update(roster, stage, number)


def _first_update(roster: Roster, stage: int, number: int) -> list[CyclicMessage]:
    """From the pass that completed the sum to the process that needs it first."""
    if _waits(roster, stage, number // roster.workers):
        return []
    target = roster.process_of(stage, roster.first_use(stage, number // roster.workers, roster.rule))
    return [roster.message(MessageContent.UPDATE, stage, number, roster.process_of(stage, number), target)]


def _arriving_update(roster: Roster, stage: int, number: int) -> list[CyclicMessage]:
    turn = _turn(roster, stage, number)
    if turn is None:
        return []
    step, place = turn
    origin, here = roster.process_of(stage, roster.last_of(step)), roster.process_of(stage, number)
    if here == origin:
        return []
    if place == 0 and not _waits(roster, stage, step):
        return [CyclicMessage(MessageContent.UPDATE, stage, step, roster.workers - 1, origin, here)]
    before = number - 1
    return [
        CyclicMessage(
            MessageContent.UPDATE, stage, step, before % roster.workers, roster.process_of(stage, before), here
        )
    ]


def _passed_update(roster: Roster, stage: int, number: int) -> list[CyclicMessage]:
    turn = _turn(roster, stage, number + 1)
    if turn is None or (turn[1] == 0 and not _waits(roster, stage, turn[0])):
        return []
    return _arriving_update(roster, stage, number + 1)


def _turn(roster: Roster, stage: int, number: int) -> tuple[int, int] | None:
    """The update whose round through a stage's processes a forward pass is part of, and its place in that round."""
    for step in (number // roster.workers - 2, number // roster.workers - 1):
        place = number - roster.first_use(stage, step, roster.rule)
        if step >= roster.begin and 0 <= place < roster.replicas(stage):
            return step, place
    return None


def _waits(roster: Roster, stage: int, step: int) -> bool:
    """Whether the process that completed an update also runs the pass just before the first that may use it."""
    before = roster.first_use(stage, step, roster.rule) - 1
    again = before > roster.last_of(step) and roster.replicas(stage) > 1
    return again and roster.process_of(stage, before) == roster.process_of(stage, roster.last_of(step))
