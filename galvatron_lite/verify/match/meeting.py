"""Whether the messages of all ranks of the world meet, as they would on the cluster.

Every rank does what its role was seen to do, with its own groups and partners (``match_places``). A collective happens
once all ranks of its group have come to it, in the order in which each starts those of the group; a message from rank
to rank once both have. A rank starts a message when all that it waited for before have happened: sends wait for their
receivers, as NCCL's may. So what passes here goes on wherever messages are not lost, however little is buffered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from galvatron_lite.plans.schema import Plan
from galvatron_lite.verify.match.places import PAIRED, RankRole, Stream, role_of, script_of
from galvatron_lite.verify.match.replay import RankMessage, Replay, StartedMessage, rank_message
from galvatron_lite.verify.schema import NOBODY, Check, During, Message, MessageType, RoleRun, Verdict

_MOST = 8  # lines of one sort that are shown
_WHAT = {
    "kind": "are of other kinds",
    "dtype": "have other dtypes",
    "shape": "have other shapes",
    "root": "have other roots",
    "operator": "sum in other ways",
    "parts": "cut what they exchange in other ways",
    "micro-batch": "are of other micro-batches",
    "layer": "are of other layers or micro-batches",
}


def where(stage: int, message: Message) -> str:
    """Where in its step a rank gives a message: ``stage 1, backward of micro-batch 2, layer h.3``."""
    during = "before the step" if message.phase is During.SETUP else str(message.phase)
    of = f" of micro-batch {message.microbatch}" if message.microbatch != NOBODY else ""
    layer = f", layer {message.layer}" if message.layer else ""
    return f"stage {stage}, {during}{of}{layer}"


def what(message: Message, stream: Stream, partner: int = NOBODY) -> str:
    """A message: ``all-reduce of (64,) float32 over ranks 0, 2 (gradients)``."""
    of = "" if message.kind is MessageType.BARRIER else f" of {message.shape} {message.dtype}"
    if message.kind in PAIRED:
        return f"{message.kind}{of} {'to' if message.kind is MessageType.SEND else 'from'} rank {partner} ({stream[0]})"
    return f"{message.kind}{of} over {rank_list(stream[1])}{f' ({stream[0]})' if stream[0] else ''}"


def rank_list(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0, 2``; the first ones where they are many."""
    shown = ", ".join(map(str, ranks[:_MOST]))
    more = f" and {len(ranks) - _MOST} more" if len(ranks) > _MOST else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def mismatch_text(ended: Replay) -> tuple[str, list[str]]:
    """Messages that met and do not fit: a line, and more of them."""
    assert ended.clash is not None
    assert ended.meeting is not None
    clash, (group, direction, count) = ended.clash, ended.meeting
    stream = ended.streams[group]
    names = rank_list([one.rank for one in clash.odd])
    common = (
        f"What {names} and rank {clash.other.rank} give one another" if direction else f"What {names} and others give"
    )
    sentence = f"{common} as message {count} of {rank_list(stream[1])} ({stream[0]}) {_WHAT[clash.what]}."
    lines = [f"expected: {_described(clash.other, stream)}", *(_described(one, stream) for one in clash.odd[:_MOST])]
    return sentence, lines


def _described(one: RankMessage, stream: Stream) -> str:
    parts = f", parts {one.message.sent}" if one.message.sent else ""
    return f"rank {one.rank} ({where(one.stage, one.message)}): {what(one.message, stream, one.peer)}{parts}"


def missing_group_text(ended: Replay) -> tuple[str, list[str]]:
    """A message of a group some of whose ranks have no such group."""
    assert ended.strangers is not None
    message, strangers = ended.strangers
    stream = ended.streams[message.meeting[0]]
    sentence = (
        f"Rank {message.rank} uses the group of {rank_list(stream[1])} ({stream[0]}), which {rank_list(strangers)} "
    )
    sentence += f"{'do' if len(strangers) > 1 else 'does'} not use."
    lines = [_line(ended, message)]
    for rank in strangers[:_MOST]:
        streams = [one for one in ended.actors[rank].part.streams if one is not None and one[0] == stream[0]]
        has = "; ".join(rank_list(one[1]) for one in streams) or "none"
        lines.append(f"rank {rank}'s groups for {stream[0]}: {has}")
    return sentence, lines


def _line(ended: Replay, message: StartedMessage) -> str:
    return _described(rank_message(ended.actors[message.rank].part, message.number), ended.streams[message.meeting[0]])


def deadlock_text(ended: Replay) -> tuple[str, list[str]]:
    """Ranks that wait for ever: for one that has ended, or in a circle."""
    waiting = _waiting(ended)
    for rank, (message, missing) in waiting.items():
        gone = [one for one in missing if ended.actors[one].ended]
        if gone:
            ends = f"{rank_list(gone)} {'end' if len(gone) > 1 else 'ends'} without it"
            stream = ended.streams[message.meeting[0]]
            lines = [_line(ended, message), *(_why_gone(ended, one, stream) for one in gone[:_MOST])]
            return f"Rank {rank} waits for ever: {ends}.", lines
    circle = _circle(waiting)
    sentence = f"Ranks wait for one another for ever: {' → '.join(map(str, (*circle, circle[0])))}."
    return sentence, [f"{_line(ended, waiting[one][0])}, waits for {rank_list(waiting[one][1])}" for one in circle]


def _why_gone(ended: Replay, rank: int, stream: Stream) -> str:
    part = ended.actors[rank].part
    lines = [number for number, line in enumerate(part.script.lines) if part.streams[line] == stream]
    if not lines:
        return f"rank {rank} gives nothing there"
    last = _described(rank_message(part, lines[-1]), stream)
    return f"rank {rank} gives {len(lines)} message{'s' if len(lines) > 1 else ''} there, the last: {last}"


Waiting = dict[int, tuple[StartedMessage, list[int]]]
"""By rank: a message that it waits for, and the ranks that do not come to it."""


def _waiting(ended: Replay) -> Waiting:
    waiting: Waiting = {}
    for rank, actor in ended.actors.items():
        held = [
            one for one in actor.open.values() if NOBODY != actor.part.script.messages[one.number].waited <= actor.next
        ]
        first = next((head for place in held for head in _heads(ended, place) if _missing(ended, head)), None)
        if first is not None:
            waiting[rank] = first, _missing(ended, first)
    return waiting


def _heads(ended: Replay, message: StartedMessage) -> Iterator[StartedMessage]:
    """What a message waits for on its own rank, where others are before it; else itself."""
    for queue in ended.actors[message.rank].lanes.values():
        if any(message in batch for batch in queue):
            yield from (one for one in queue[0] if not one.done)
            return
    yield message


def _missing(ended: Replay, message: StartedMessage) -> list[int]:
    group, direction, _ = message.meeting
    there = {one.rank for one in ended.present[message.meeting]}
    wanted = ended.streams[group][1] if direction is None else direction[:2]
    return [rank for rank in wanted if rank not in there]


def _circle(waiting: Waiting) -> list[int]:
    path: list[int] = []
    rank = next(iter(waiting))
    while rank not in path:
        path.append(rank)
        rank = next(one for one in waiting[rank][1] if one in waiting)
    circle = path[path.index(rank) :]
    first = circle.index(min(circle))
    return [*circle[first:], *circle[:first]]


def unmatched_text(ended: Replay) -> tuple[str, list[str]]:
    """Messages that nobody waits for, and that never arrive."""
    held = ended.open
    given = held[0]
    message = ended.actors[given.rank].part.script.messages[given.number]
    missing = rank_list(_missing(ended, given)) if _missing(ended, given) else "its partners"
    verb = {MessageType.SEND: "never receives it", MessageType.RECEIVE: "never sends it"}.get(
        message.kind, "never gives it"
    )
    sentence = f"Rank {given.rank} has a {message.kind} left at the end of the step: {missing} {verb}"
    more = f" ({len(held)} messages in all)." if len(held) > 1 else "."
    return sentence + more, [_line(ended, one) for one in held[:_MOST]]


_RANK = re.compile(r"^Rank (\d+) \(stage (\d+)\)(.*)$", re.DOTALL)
_STAGE = re.compile(r"^([Ss])tage (\d+)(: .*)$", re.DOTALL)


def folded(lines: Iterable[str]) -> list[str]:
    """The lines in order; ranks, or stages, of which the same is said are named together in the first of them."""
    groups: dict[tuple[str, str], list[re.Match[str] | str]] = {}
    for line in lines:
        match = _RANK.match(line) or _STAGE.match(line)
        key = (line, "") if match is None else (match[3], "" if match.re is _RANK else match[1])
        groups.setdefault(key, []).append(line if match is None else match)
    return [_folded_line(group) for group in groups.values()]


def _folded_line(parts: Sequence[re.Match[str] | str]) -> str:
    matches = [part for part in parts if not isinstance(part, str)]
    if len(matches) < 2:
        return parts[0] if isinstance(parts[0], str) else parts[0][0]
    stages = _numbers(sorted({int(one[2]) for one in matches}))
    if matches[0].re is _STAGE:
        return f"{matches[0][1]}tages {stages}{matches[0][3]}"
    many = "stages" if len({one[2] for one in matches}) > 1 else "stage"
    return f"Ranks {_numbers(sorted(int(one[1]) for one in matches))} ({many} {stages}){matches[0][3]}"


def _numbers(numbers: Sequence[int]) -> str:
    """``0 to 2, 5`` for 0, 1, 2 and 5; ``0, 1`` for two."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(parts)


FIT = "messages fit"
PROGRESS = "no rank waits for ever"


def match(runs: Sequence[RoleRun], plan: Plan) -> list[Check]:
    """Replay the messages of all ranks from the runs of one rank of each role.

    As in NCCL, messages of one group happen one after the other on each rank, those from rank to rank that start alone
    in order with the ones of the same partner.
    """
    scripts = [script_of(run) for run in runs]
    parts = {rank: role_of(script, rank, plan.stage_devices) for script in scripts for rank in script.run.ranks}
    unknown = [rank for rank in range(plan.devices) if rank not in parts]
    if unknown:
        sentence = f"Of {rank_list(unknown)} it is not known what they do."
        return [Check(name, Verdict.SKIPPED, sentence) for name in (FIT, PROGRESS)]
    lost = [part for part in parts.values() if None in part.streams]
    if lost:
        return _ended(Check(FIT, Verdict.FAILED, *_lost_text(lost[0])))
    ended = Replay(parts)
    ended.run()
    return _verdicts(ended, parts)


def _passed(parts: Mapping[int, RankRole]) -> list[Check]:
    count = sum(message.times for part in parts.values() for message in part.script.messages)
    groups = len({stream for part in parts.values() for stream in part.streams})
    return [
        Check(FIT, Verdict.PASSED, f"All {count} messages of {len(parts)} ranks in {groups} groups fit."),
        Check(PROGRESS, Verdict.PASSED, f"All {len(parts)} ranks come to the end of the step."),
    ]


def _verdicts(ended: Replay, parts: Mapping[int, RankRole]) -> list[Check]:
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


def _failed(name: str, text: tuple[str, list[str]]) -> Check:
    return Check(name, Verdict.FAILED, text[0], tuple(text[1]))


def _ended(failed: Check) -> list[Check]:
    return [failed, Check(PROGRESS, Verdict.SKIPPED, "Not known: the messages do not fit.")]


def _lost_text(part: RankRole) -> tuple[str, tuple[str, ...]]:
    place = part.streams.index(None)
    purpose, ranks = part.script.groups[place]
    run = part.script.run
    sentence = (
        f"Rank {run.rank} uses the group of {rank_list(ranks)} ({purpose}); rank {part.rank}, which is to do the "
    )
    return sentence + "same in its own place, has no such group.", (f"role: {run.role}",)
