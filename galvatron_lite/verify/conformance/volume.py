"""Check the bytes that a rank sends in a step against those that the cost model prices.

A rank of n sends, of S bytes in total, 2 (n-1)/n S in an all-reduce, (n-1)/n S in an all-gather or reduce-scatter, and
S in a broadcast or a message between two ranks (``cluster.collectives``). Of an all-to-all, what it receives counts.
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
"""A class of bytes may differ by the largest of: this share of itself, this share of all that is sent, and so many
bytes for each of two or more micro-batches (scalars, of which layers may sum a few more than priced). A group of
devices whose total exceeds the price by ``EXPLAINED`` fails."""
_NOT_PRICED = "not priced"


def volume(runs: Sequence[RoleRun], plan: Plan, profile: Profile) -> Check:
    """Compare sent with priced bytes by class, for each group of devices; the details are a table of both."""
    planned, pricer = PlannedLayers(plan, profile.graph), LayerPricer(profile)
    table, differing, excessive = list[str](), list[str](), list[str]()
    slack, classes = SLACK * max(plan.microbatches, 2), _classes()
    for group in range(plan.pipeline):
        group_runs = [run for run in runs if run.stage == group]
        if not group_runs:
            continue
        priced, sent = defaultdict(float, predicted_bytes(pricer, planned, group)), _most_sent(group_runs, planned)
        total_priced, total_sent = sum(priced.values()), sum(sent.values())
        margin = max(SMALL * max(total_priced, total_sent), slack)
        for name in (*classes, *sorted(sent.keys() - set(classes))):
            price, difference = format_bytes(priced[name]), sent[name] - priced[name]
            if sent[name] or priced[name]:
                signed = f"{'-' if difference < 0 else '+'}{format_bytes(abs(difference))}"
                pair = f"predicted {price}, dry run {format_bytes(sent[name])}"
                table.append(f"stage {group}: {name}: {pair}, difference {signed}")
            if name not in classes and sent[name] > margin:
                differing.append(f"Stage {group} sends {format_bytes(sent[name])} that is {name}.")
            elif abs(difference) > max(TOLERANCE * priced[name], margin):
                differing.append(f"Stage {group} sends {format_bytes(sent[name])} for {name}; priced are {price}.")
        if total_sent - total_priced > max(EXPLAINED * total_priced, margin):
            totals = f"{format_bytes(total_sent)} in all; priced are {format_bytes(total_priced)}."
            excessive.append(f"Stage {group} sends {totals}")
    if differences := folded([*excessive, *differing]):
        verdict = Verdict.FAILED if excessive else Verdict.DIFFERS
        return Check(VOLUME, verdict, differences[0], (*differences[1:], *folded(table)))
    passed = (
        f"What is sent differs from what is priced by less than {TOLERANCE:.0%} of its class or {SMALL:.0%} of all."
    )
    return Check(VOLUME, Verdict.PASSED, passed, tuple(folded(table)))


def _classes() -> list[str]:
    """Return the priced classes of bytes: names of dimensions, and what is sent between layers and stages."""
    return [*(dimension.name for dimension in pinned()), "redistribution", "pipeline", COPIES]


def _most_sent(runs: Sequence[RoleRun], planned: PlannedLayers) -> dict[str, float]:
    by_run = [sent_bytes(run, planned) for run in runs]
    names = dict.fromkeys([*_classes(), *(name for sent in by_run for name in sent)])
    return {name: max(sent.get(name, 0.0) for sent in by_run) for name in names}


def sent_bytes(run: RoleRun, planned: PlannedLayers) -> dict[str, float]:
    """Return the wire bytes of a rank in a step, by class."""
    stage_strategies = [planned.strategies[name] for name in planned.layers_of(run.stage)]
    bytes_: dict[str, float] = defaultdict(float)
    for message in run.messages:
        if message.phase is not During.SETUP:
            strategy = planned.strategies.get(message.layer or "")
            name = _class_of(message, stage_strategies if strategy is None else [strategy])
            bytes_[name] += wire_bytes(message, run.rank) * message.times
    return bytes_


def _class_of(message: Message, strategies: Sequence[Strategy]) -> str:
    """Return the class of a message that belongs to a layer with one of ``strategies``."""
    purpose, kind = message.purpose, message.kind
    if purpose.startswith("pipeline "):
        return "pipeline"
    if purpose == COPIES:
        return COPIES
    if purpose == Purpose.ACTIVATIONS and kind is MessageType.ALL_TO_ALL:
        return "redistribution"
    senders = [dimension for dimension in pinned() if dimension.sends(purpose, sums=kind is MessageType.ALL_REDUCE)]
    used = [sender for sender in senders if any(map(sender.word, strategies))]
    return next((sender.name for sender in (*used, *reversed(senders))), f"{_NOT_PRICED} ({purpose})")


def wire_bytes(message: Message, rank: int) -> float:
    """Return the bytes that a rank sends in one collective; of an all-to-all, those that it receives."""
    size, ways = message.bytes, len(message.ranks)
    if message.kind is MessageType.ALL_TO_ALL:
        if not message.taken:
            return size * (ways - 1) / ways
        item_bytes = size / prod(message.shape) if prod(message.shape) else 1.0
        return (sum(message.taken) - message.taken[message.ranks.index(rank)]) * item_bytes
    factor = {
        MessageType.ALL_REDUCE: 2 * (ways - 1) / ways,
        MessageType.ALL_GATHER: ways - 1,
        MessageType.REDUCE_SCATTER: (ways - 1) / ways,
    }
    return size * factor.get(message.kind, 1.0)


def predicted_bytes(pricer: LayerPricer, planned: PlannedLayers, group: int) -> dict[str, float]:
    """Return the priced wire bytes of a group's busiest device in a step, by class."""
    plan, bytes_ = planned.plan, defaultdict[str, float](float)
    local_layers = set(planned.layers_of(group))
    for stage in planned.stages_of(group):
        for name in planned.stages[stage]:
            work = pricer.work(planned.kind_on(name, local_layers), planned.strategies[name], plan.microbatch)
            for communication in work.communications:
                bytes_[_priced_class(communication)] += _priced_bytes(communication, plan.microbatches)
        bytes_["redistribution"] += _redistribution_bytes(planned, planned.ranges[stage]) * plan.microbatches
        bytes_["pipeline"] += _pipeline_bytes(planned, stage) * plan.microbatches
    bytes_[COPIES] = _copy_bytes(pricer.profile, planned, local_layers)
    return bytes_


def _copy_bytes(profile: Profile, planned: PlannedLayers, local_layers: Collection[str]) -> float:
    """Return the bytes of gradients that are summed with other stages' copies of shared parameters."""
    layers, total = list(planned.layers), 0.0
    for index, sharing in sharing_of(planned.graph, {layers.index(name) for name in local_layers}).items():
        strategy = planned.strategies[layers[index]]
        share = sharing.exchanged / (strategy.weight_slices * strategy.parameter_shards)
        total += share * ITEM_BYTES[profile.reduce_precision]
    return total


def _priced_class(priced: Communication) -> str:
    """Return the dimension that causes a communication; sums once a step are gradients, whatever causes them."""
    if priced.moment is Moment.STEP and priced.collective is Collective.ALL_REDUCE:
        return next(sender.name for sender in pinned() if sender.sends(Purpose.GRADIENTS, sums=True))
    return next((sender.name for sender in pinned() if priced.cause in (sender.name, *sender.causes)), priced.cause)


def _priced_bytes(priced: Communication, microbatches: int) -> float:
    ways, times = int(priced.group.size), 1 if priced.moment is Moment.STEP else microbatches
    factors = {Collective.ALL_REDUCE: 2 * (ways - 1) / ways, Collective.BROADCAST: 1.0, Collective.SEND_RECV: 1.0}
    return float(priced.size) * factors.get(priced.collective, (ways - 1) / ways) * float(priced.count) * times


def _redistribution_bytes(planned: PlannedLayers, indices: range) -> float:
    """Return the bytes of a micro-batch that change layout in a stage or at its entry, forward and backward."""
    graph, first = planned.graph, indices.start
    pairs = [(first - 1, first, graph.crossing(first))] * bool(first)
    layouts = [np.array(layout_of(strategy)) for strategy in planned.strategies.values()]
    return sum(
        2 * size * planned.plan.microbatch * float(received_shares(layouts[left], layouts[right]))
        for left, right, size in (*pairs, *graph.exchanges(indices))
    )


def _pipeline_bytes(planned: PlannedLayers, stage: int) -> float:
    """Return the bytes of a micro-batch that a device sends to the stages before and after its stage."""
    plan, indices, total = planned.plan, planned.ranges[stage], 0.0
    strategies = list(planned.strategies.values())
    for cut, other in ((indices.start, stage - 1), (indices.stop, stage + 1)):
        groups = {group_of(plan.schedule, plan.pipeline, number) for number in (stage, other)}
        if 0 <= other < len(plan.stages) and len(groups) > 1:
            total += boundary_bytes(planned.graph.crossing(cut), plan.microbatch, strategies[cut - 1])
    return total
