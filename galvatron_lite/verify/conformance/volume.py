"""Bytes that a rank puts on the wire in a step, against what the cost model prices.

Wire bytes of a collective over n ranks are those of the formulas in ``cluster.collectives``, of S bytes in all:
2 (n-1)/n S of an all-reduce, (n-1)/n S of an all-gather or reduce-scatter, what comes from others of an all-to-all, S
of a broadcast or a message from rank to rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from math import prod

import numpy as np

from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.layout import received_shares
from galvatron_lite.cost.stage import sharing_of
from galvatron_lite.parallelism.axes import Purpose
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.parallelism.layout import layout_of
from galvatron_lite.parallelism.pipeline.cost import boundary_bytes
from galvatron_lite.parallelism.pipeline.schedule import group_of
from galvatron_lite.parallelism.registry import pinned
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.units import ITEM_BYTES, format_bytes
from galvatron_lite.verify.conformance.groups import COPIES
from galvatron_lite.verify.conformance.layers import PlannedLayers
from galvatron_lite.verify.conformance.memory import EXPLAINED
from galvatron_lite.verify.match.words import folded
from galvatron_lite.verify.schema import Check, During, Message, MessageType, RoleRun, Verdict

VOLUME = "communication is as priced"
TOLERANCE, SMALL, SLACK = 0.10, 0.02, 2**11
"""A class may differ by this share of itself, by that of all that is sent, and by so many bytes a micro-batch, at least
two (sums of single figures, of which layers may make a few more than priced). A group of devices that sends more than
priced in all, by ``EXPLAINED`` of it, fails."""
_NOT_PRICED = "not priced"


def volume(runs: Sequence[RoleRun], plan: Plan, profile: Profile) -> Check:
    """A table of what was sent and what was priced, by class, of each group of devices."""
    planned, pricer = PlannedLayers(plan, profile.graph), LayerPricer(profile)
    lines, wrong, far = list[str](), list[str](), list[str]()
    slack, classes = SLACK * max(plan.microbatches, 2), _classes()
    for group in range(plan.pipeline):
        group_runs = [run for run in runs if run.stage == group]
        if not group_runs:
            continue
        priced, sent = predicted_bytes(pricer, planned, group), _most(group_runs, planned)
        together, sent_together = sum(priced.values()), sum(sent.values())
        least = max(SMALL * max(together, sent_together), slack)
        for name in (*classes, *sorted(sent.keys() - set(classes))):
            line = f"predicted {format_bytes(priced.get(name, 0.0))}, dry run {format_bytes(sent[name])}"
            difference = sent[name] - priced.get(name, 0.0)
            if sent[name] or priced.get(name):
                sign = "-" if difference < 0 else "+"
                lines.append(f"stage {group}: {name}: {line}, difference {sign}{format_bytes(abs(difference))}")
            if name not in classes and sent[name] > least:
                wrong.append(f"Stage {group} sends {format_bytes(sent[name])} that is {name}.")
            elif abs(difference) > max(TOLERANCE * priced.get(name, 0.0), least):
                passed = f"{format_bytes(sent[name])} for {name}; priced are {format_bytes(priced.get(name, 0.0))}."
                wrong.append(f"Stage {group} sends {passed}")
        if sent_together - together > max(EXPLAINED * together, least):
            passed = f"{format_bytes(sent_together)} in all; priced are {format_bytes(together)}."
            far.append(f"Stage {group} sends {passed}")
    if differences := folded([*far, *wrong]):
        return Check(
            VOLUME, Verdict.FAILED if far else Verdict.DIFFERS, differences[0], (*differences[1:], *folded(lines))
        )
    passed = (
        f"What is sent differs from what is priced by less than {TOLERANCE:.0%} of its class or {SMALL:.0%} of all."
    )
    return Check(VOLUME, Verdict.PASSED, passed, tuple(folded(lines)))


def _classes() -> list[str]:
    """What a step's bytes are sent for, as far as it is priced: dimensions by name, and what lies between layers."""
    return [*(one.name for one in pinned()), "redistribution", "pipeline", COPIES]


def _most(runs: Sequence[RoleRun], planned: PlannedLayers) -> dict[str, float]:
    each = [sent_bytes(run, planned) for run in runs]
    names = dict.fromkeys([*_classes(), *(name for one in each for name in one)])
    return {name: max(one.get(name, 0.0) for one in each) for name in names}


def sent_bytes(run: RoleRun, planned: PlannedLayers) -> dict[str, float]:
    """Wire bytes of a rank in a step, by class."""
    here = [planned.strategies[name] for name in planned.layers_of(run.stage)]
    bytes_: dict[str, float] = defaultdict(float)
    for message in run.messages:
        if message.phase is not During.SETUP:
            strategy = planned.strategies.get(message.layer or "")
            bytes_[_class_of(message, here if strategy is None else [strategy])] += (
                wire_bytes(message, run.rank) * message.times
            )
    return bytes_


def _class_of(message: Message, strategies: Sequence[Strategy]) -> str:
    """What a message is sent for, of a layer that has one of these strategies."""
    purpose, kind = message.purpose, message.kind
    if purpose.startswith("pipeline "):
        return "pipeline"
    if purpose == COPIES:
        return COPIES
    if purpose == Purpose.ACTIVATIONS and kind is MessageType.ALL_TO_ALL:
        return "redistribution"
    senders = [one for one in pinned() if one.sends(purpose, sums=kind is MessageType.ALL_REDUCE)]
    used = [sender for sender in senders if any(map(sender.word, strategies))]
    return next((one.name for one in (*used, *reversed(senders))), f"{_NOT_PRICED} ({purpose})")


def wire_bytes(message: Message, rank: int) -> float:
    """Bytes that a rank sends, or gets of an all-to-all, in one collective."""
    size, ways = message.bytes, len(message.ranks)
    if message.kind is MessageType.ALL_TO_ALL:
        if not message.taken:
            return size * (ways - 1) / ways
        item = size / prod(message.shape) if prod(message.shape) else 1.0
        return (sum(message.taken) - message.taken[message.ranks.index(rank)]) * item
    factor = {
        MessageType.ALL_REDUCE: 2 * (ways - 1) / ways,
        MessageType.ALL_GATHER: ways - 1,
        MessageType.REDUCE_SCATTER: (ways - 1) / ways,
    }
    return size * factor.get(message.kind, 1.0)


def predicted_bytes(pricer: LayerPricer, planned: PlannedLayers, group: int) -> dict[str, float]:
    """Wire bytes of the fullest device of a group in a step, as priced, by class."""
    plan, bytes_ = planned.plan, defaultdict[str, float](float)
    here = set(planned.layers_of(group))
    for stage in planned.stages_of(group):
        for name in planned.stages[stage]:
            work = pricer.work(planned.kind_on(name, here), planned.strategies[name], plan.microbatch)
            for communication in work.communications:
                bytes_[_caused(communication)] += _priced_bytes(communication, plan.microbatches)
        bytes_["redistribution"] += _moved(planned, planned.ranges[stage]) * plan.microbatches
        bytes_["pipeline"] += _handed_on(planned, stage) * plan.microbatches
    bytes_[COPIES] = _summed_copies(pricer.profile, planned, here)
    return bytes_


def _summed_copies(profile: Profile, planned: PlannedLayers, here: Collection[str]) -> float:
    """Bytes of gradients that devices sum with other stages' copies of the same parameters; see ``LayerPricer``."""
    layers, total = list(planned.layers), 0.0
    for place, sharing in sharing_of(planned.graph, {layers.index(name) for name in here}).items():
        strategy = planned.strategies[layers[place]]
        share = sharing.exchanged / (strategy.weight_slices * strategy.parameter_shards)
        total += share * ITEM_BYTES[profile.reduce_precision]
    return total


def _caused(one: Communication) -> str:
    """The dimension that it is sent for; what is summed once a step are gradients, whatever makes the sum needed."""
    if one.moment is Moment.STEP and one.collective is Collective.ALL_REDUCE:
        return next(sender.name for sender in pinned() if sender.sends(Purpose.GRADIENTS, sums=True))
    return next((sender.name for sender in pinned() if one.cause in (sender.name, *sender.causes)), one.cause)


def _priced_bytes(one: Communication, microbatches: int) -> float:
    ways, times = int(one.group.size), 1 if one.moment is Moment.STEP else microbatches
    factors = {Collective.ALL_REDUCE: 2 * (ways - 1) / ways, Collective.BROADCAST: 1.0, Collective.SEND_RECV: 1.0}
    return float(one.size) * factors.get(one.collective, (ways - 1) / ways) * float(one.count) * times


def _moved(planned: PlannedLayers, inside: range) -> float:
    """Bytes of one micro-batch that go between layouts inside a stage and into it, both ways."""
    graph, first = planned.graph, inside.start
    pairs = [(first - 1, first, graph.crossing(first))] * bool(first)
    layouts = [np.array(layout_of(strategy)) for strategy in planned.strategies.values()]
    return sum(
        2 * size * planned.plan.microbatch * float(received_shares(layouts[left], layouts[right]))
        for left, right, size in (*pairs, *graph.exchanges(inside))
    )


def _handed_on(planned: PlannedLayers, stage: int) -> float:
    """Bytes of one micro-batch that a device sends over both ends of a stage."""
    plan, inside, total = planned.plan, planned.ranges[stage], 0.0
    chosen = list(planned.strategies.values())
    for cut, other in ((inside.start, stage - 1), (inside.stop, stage + 1)):
        groups = {group_of(plan.schedule, plan.pipeline, number) for number in (stage, other)}
        if 0 <= other < len(plan.stages) and len(groups) > 1:
            total += boundary_bytes(planned.graph.crossing(cut), plan.microbatch, chosen[cut - 1])
    return total
