"""What a plan of cyclic data parallelism costs: its steady state, simulated, and what devices hold in it.

The seconds of a step are those of the loop of passes (``parallelism.cyclic.simulation``), plus fixed host time. A pass
takes the seconds of its layers and host time for each message. Messages travel beside compute (the share of them in
``Profile.hidden``, by default all), and count if a pass waits for them. Start-up takes 2(N-1) more time steps once a
run and is left out. Memory is that of the worst pass of any device. The method: arXiv 2403.08837.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.cost.layer import ALONE, LayerCost, LayerPricer
from galvatron_lite.cost.memory import terms, worst_moment
from galvatron_lite.cost.stage import sharing_of, tied_groups
from galvatron_lite.cost.step import prediction_of, straggling, strategies_of
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.parallelism.cyclic.programme import CyclicMessage, CyclicPass, CyclicProgramme, MessageContent
from galvatron_lite.parallelism.cyclic.rules import CyclicSetting
from galvatron_lite.parallelism.cyclic.simulation import (
    CyclicSlot,
    Holding,
    Loop,
    equal_cuts,
    holdings,
    loop_of,
    received_beside,
    round_seconds,
)
from galvatron_lite.parallelism.pipeline.cost import stride_between
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import check_plan
from galvatron_lite.plans.schema import Cyclic, MemoryBreakdown, Plan, TimeBreakdown

NAME = "cyclic"
"""Cause of its messages, in the keys of ``Profile.hidden``."""
UNSPLIT = Strategy()
"""The strategy of every layer: it is on one device."""


def price_cyclic(pricer: LayerPricer, plan: Plan) -> Plan:
    """Return the plan with its prediction, and the memory of the devices of every stage.

    Raises:
        InputError: the plan does not fit the profile's model, its numbers contradict one another, or layers of two
            stages share parameters.
    """
    priced = price(pricer, plan)
    memory = priced.memory()
    stages = tuple(
        replace(
            stage,
            memory=memory[index],
            microbatch_seconds=figures.forward + figures.backward + figures.recompute + figures.host,
        )
        for index, (stage, figures) in enumerate(zip(plan.stages, priced.stages, strict=True))
    )
    profile = pricer.profile
    time = priced.time(straggling(profile, plan.devices))
    peak = max(stage_memory.total for stage_memory in memory)
    return replace(plan, stages=stages, prediction=prediction_of(profile, plan, time.total, time, peak))


def price(pricer: LayerPricer, plan: Plan) -> CyclicFigures:
    """Return the figures of a plan's stages; raises as ``price_cyclic``."""
    check_plan(plan)
    if plan.cyclic is None:
        raise InputError("plan, cyclic", None, "Say the rule and the setting.")
    if any(strategy != UNSPLIT for strategy in strategies_of(plan, pricer.profile)):
        raise InputError("strategy", "cyclic", "Under cyclic data parallelism every layer is whole: on one device.")
    cuts = (0, *accumulate(sum(run.count for run in stage.runs) for stage in plan.stages))
    return CyclicFigures(pricer, plan.cyclic, tuple(stage_figures(pricer, cuts, plan.microbatch)))


@dataclass(frozen=True, slots=True)
class CyclicFigures:
    """The figures of a plan."""

    pricer: LayerPricer
    cyclic: Cyclic  # rule and setting
    stages: tuple[StageFigures, ...]
    message_times: dict[tuple[int, RankGroup], float] = field(default_factory=dict)  # seconds, remembered

    @property
    def loop(self) -> Loop:
        """The passes and messages that repeat."""
        return loop_of(self.cyclic.rule, self.cyclic.setting, len(self.stages))

    @property
    def _programme(self) -> CyclicProgramme:
        return CyclicProgramme(self.cyclic.rule, self.cyclic.setting, len(self.stages))

    @property
    def _takes_turns(self) -> bool:
        """Whether the processes of a stage take turns."""
        return self.cyclic.setting is CyclicSetting.STAGES

    @property
    def _exposed_share(self) -> float:
        """Share of a message's seconds that compute does not hide."""
        return 1.0 - self.pricer.profile.hidden.get(NAME, 1.0)

    def time(self, factor: float = 1.0) -> TimeBreakdown:
        """Return the seconds of a step of the busiest device.

        What is not its work is waiting: for messages under way (``communication``), and for other devices
        (``pipeline``).

        Args:
            factor: on all of it, for the slowest of many devices.
        """
        loop, fixed = self.loop, self.pricer.profile.overhead.step
        sends = [self.message_seconds(message) for message in loop.messages]
        passes = [self.pass_seconds(slot, sends) for slot in loop.slots]
        step = round_seconds(loop, passes, sends)
        without_messages = round_seconds(loop, passes, [0.0] * len(sends))
        work = max(self._work_by_process().values(), key=lambda breakdown: breakdown.total)
        exposed = self._exposed_share * sum(sends) / len({slot.process for slot in loop.slots})
        work = replace(work, communication=work.communication + exposed)
        waiting = max(without_messages - work.total, 0.0)
        total = (step + fixed) * factor
        return replace(
            work,
            communication=work.communication + max(step - work.total - waiting, 0.0),
            pipeline=waiting,
            other=work.other + fixed + total - (step + fixed),
        )

    def pass_seconds(self, slot: CyclicSlot, sends: Sequence[float]) -> float:
        """Return the seconds that a pass takes its process.

        They include the host time of its messages, and updates of parameters.

        Args:
            slot: the pass.
            sends: seconds of every message of the loop.
        """
        stage = self.stages[slot.action.moment.stage]
        compute = stage.backward + stage.recompute if slot.action.moment.backward else stage.forward
        exposed = self._exposed_share * sum(sends[message] for message in slot.sends)
        return compute + stage.host / 2 + self._message_host(slot) + self._update_seconds(slot) + exposed

    def _message_host(self, slot: CyclicSlot) -> float:
        """Host seconds of messages."""
        return (len(slot.receives) + len(slot.sends)) * self.pricer.profile.overhead.pipeline

    def _update_seconds(self, slot: CyclicSlot) -> float:
        """Seconds of updates: of each process before forward, or (``single``) after the pass that ends the sum."""
        stage, action = self.stages[slot.action.moment.stage], slot.action
        single = self.cyclic.setting is CyclicSetting.SINGLE
        return (action.finishes if single else len(action.applies)) * (stage.update + stage.update_host)

    def _work_by_process(self) -> Mapping[int, TimeBreakdown]:
        """The work of each process in a step; if processes take turns, of one process of each stage."""
        work: dict[int, TimeBreakdown] = {}
        for slot in self.loop.slots:
            index, backward = slot.action.moment.stage, slot.action.moment.backward
            stage = self.stages[index]
            turns = self._programme.replicas(index) if self._takes_turns else 1
            key = index if self._takes_turns else slot.process
            before = work.get(key, TimeBreakdown())
            updates, update = self._update_seconds(slot), stage.update_host + stage.update
            update_host = updates * (stage.update_host / update if update else 0.0)
            work[key] = TimeBreakdown(
                before.forward + (0.0 if backward else stage.forward / turns),
                before.backward + (stage.backward / turns if backward else 0.0),
                before.recompute + (stage.recompute / turns if backward else 0.0),
                optimizer=before.optimizer + (updates - update_host) / turns,
                other=before.other + (stage.host / 2 + self._message_host(slot) + update_host) / turns,
            )
        return work

    def message_bytes(self, message: CyclicMessage) -> int:
        """Return the bytes of a message."""
        stage = self.stages[message.stage]
        if message.kind is MessageContent.ACTIVATION:
            return stage.leaving
        if message.kind is MessageContent.GRADIENT:
            return stage.entering
        return stage.gradients

    def message_seconds(self, message: CyclicMessage) -> float:
        """Return the seconds from the send of a message to its arrival.

        If processes take turns, they are those of the farthest pair. In every time step about as many messages are
        under way as there are workers.
        """
        node, count = self.pricer.profile.cluster.levels[0].size, len(self.stages)
        processes = self._message_processes(message)
        stride = stride_between(min(processes), max(processes), 1, node)
        siblings = max(1, min(count, node) // 2) if stride == 1 else (count if self._takes_turns else 1)
        size, group = self.message_bytes(message), RankGroup(2, stride, siblings)
        if (size, group) not in self.message_times:
            send = Communication(Collective.SEND_RECV, size, group, Moment.FORWARD, overlaps=True, cause=NAME)
            self.message_times[size, group] = self.pricer.links.seconds(send)
        return self.message_times[size, group]

    def _message_processes(self, message: CyclicMessage) -> tuple[int, ...]:
        """The first and last of the processes that may send or receive a message."""
        if not self._takes_turns:
            return message.source, message.target
        shift = {MessageContent.ACTIVATION: 1, MessageContent.GRADIENT: -1}.get(message.kind, 0)
        programme, stages = self._programme, (message.stage, message.stage + shift)
        firsts = [programme.process_of(stage, 0) for stage in stages]
        lasts = [first + programme.replicas(stage) - 1 for first, stage in zip(firsts, stages, strict=True)]
        return *firsts, *lasts

    def memory(self) -> list[MemoryBreakdown]:
        """Return the bytes on the fullest of the devices that run each stage, at its worst moment."""
        held = holdings(self.cyclic.rule, self.cyclic.setting, len(self.stages))
        moments = [(holding.action.moment.stage, self._worst_moment(holding)) for holding in held]
        if not self._takes_turns:
            return [_fullest(memory for _, memory in moments)] * len(self.stages)
        return [_fullest(memory for stage, memory in moments if stage == index) for index in range(len(self.stages))]

    def _worst_moment(self, holding: Holding) -> MemoryBreakdown:
        """Bytes on a device at the worst moment of a pass: of the pass, of an update, or of copying what it sends.

        An update that a forward pass sends on is copied before the pass.
        """
        action, backward = holding.action, holding.action.moment.backward
        stage = self.stages[action.moment.stage]
        rest = self._held_throughout(holding)
        working = stage.backward_peak - stage.gradients if backward else stage.forward_peak
        updates = [message for message in action.sends if message.kind is MessageContent.UPDATE]
        early_copies = 0 if backward else self._bytes_of(updates)
        moments = (
            (stage.kept, max(working - stage.kept, 0), early_copies),
            (0, stage.updating if self._updates(action) else 0, early_copies),
            (0 if backward else stage.kept, 0, self._bytes_of(action.sends)),
        )
        kept, temporary, copies = max(moments, key=sum)
        return replace(
            rest,
            gradients=rest.gradients + (stage.gradients if backward else 0),
            activations=rest.activations + kept,
            temporary=temporary,
            communication=rest.communication + copies,
        )

    def _held_throughout(self, holding: Holding) -> MemoryBreakdown:
        """Bytes on a device throughout a pass, without what the pass makes."""
        stages = self.stages
        gradients = sum(stages[stage].gradients for stage in holding.sums)
        gradients += sum(count * stages[stage].gradients for stage, count in holding.updates)
        carried = stages[holding.action.moment.stage].carried if self._takes_turns else 0
        messages = (*received_beside(holding.action), *holding.unreceived, *holding.next_receives)
        return MemoryBreakdown(
            parameters=sum(count * stages[stage].parameters for stage, count in holding.versions),
            gradients=gradients,
            optimizer=sum(stages[stage].states for stage, _ in holding.versions),
            activations=sum(count * stages[stage].kept for stage, count in holding.live) + carried,
            communication=self._bytes_of(messages),
            context=self.pricer.profile.cluster.device.context,
        )

    def _bytes_of(self, messages: Iterable[CyclicMessage]) -> int:
        return sum(map(self.message_bytes, messages))

    def _updates(self, action: CyclicPass) -> bool:
        """Whether the process updates parameters beside a pass."""
        return action.finishes if self.cyclic.setting is CyclicSetting.SINGLE else bool(action.applies)


def _fullest(memories: Iterable[MemoryBreakdown]) -> MemoryBreakdown:
    return max(memories, key=lambda memory: memory.total)


@dataclass(frozen=True, slots=True)
class StageFigures:
    """What one stage costs one device."""

    forward: float  # forward, backward: seconds of compute of a micro-batch; backward without ``recompute``
    backward: float
    recompute: float  # seconds of a micro-batch
    host: float  # seconds of fixed host work of a micro-batch, half in either pass
    update: float  # seconds of the optimizer
    update_host: float  # seconds of fixed host work of an update
    parameters: int  # bytes of one version, with buffers
    gradients: int  # bytes
    states: int  # bytes of optimizer states
    kept: int  # bytes saved from forward to backward of a micro-batch
    forward_peak: int  # bytes at the worst moment of forward, beyond parameters and what other stages hold
    backward_peak: int  # bytes at the worst moment of backward, with its gradients
    updating: int  # temporary bytes of the optimizer
    entering: int  # entering, leaving: bytes of a micro-batch of the tensors that cross its boundaries
    leaving: int
    carried: int  # bytes of a micro-batch of copies of tensors of earlier stages, on separate devices


def stage_figures(pricer: LayerPricer, cuts: Sequence[int], microbatch: int) -> list[StageFigures]:
    """Return the figures of all stages.

    Args:
        pricer: of the profile.
        cuts: indices of the layers at which stages begin, and the number of layers.
        microbatch: samples.

    Raises:
        InputError: the profile has no points of an unsplit layer, or layers of two stages share parameters.
    """
    graph = pricer.profile.graph
    _check_sharing(graph, cuts)
    layers = layer_costs(pricer, microbatch)
    return [
        _stage_figures(graph, range(start, stop), layers[start:stop], microbatch, pricer.profile.overhead.microbatch)
        for start, stop in pairwise(cuts)
    ]


def layer_costs(pricer: LayerPricer, microbatch: int) -> list[LayerCost]:
    """Return the cost of every layer on one device.

    Raises:
        InputError: the profile has no points of one.
    """
    graph, costs = pricer.profile.graph, list[LayerCost]()
    sharings = sharing_of(graph, range(len(graph.layers)))
    for index, layer in enumerate(graph.layers):
        cost = pricer.price(layer.kind, UNSPLIT, microbatch, 1, sharings.get(index, ALONE))
        if cost is None:
            raise InputError(f"strategy of {layer.name}", str(UNSPLIT), "The profile has no figures of it whole.")
        costs.append(cost)
    return costs


def split(pricer: LayerPricer, stages: int, microbatch: int) -> tuple[int, ...]:
    """Cut a model into stages of equal seconds of forward and backward.

    Returns:
        The indices of the layers at which stages begin, and the number of layers; empty if too few layers can be in
        separate stages.

    Raises:
        InputError: the profile has no points of an unsplit layer.
    """
    graph = pricer.profile.graph
    if graph.whole and stages > 1:
        return ()
    costs = layer_costs(pricer, microbatch)
    return equal_cuts([cost.forward_seconds + cost.backward_seconds for cost in costs], stages, _inseparable(graph))


def _check_sharing(graph: ModelGraph, cuts: Sequence[int]) -> None:
    """Refuse stages that share parameters: they would use different versions of them."""
    for run in _inseparable(graph):
        cut = next((cut for cut in cuts if run.start < cut < run.stop), None)
        if cut is not None:
            first, last = graph.layers[run.start].name, graph.layers[run.stop - 1].name
            remedy = f"A stage may not begin at {graph.layers[cut].name}: {first} and {last} share parameters."
            raise InputError("stages", "cyclic", remedy)


def _inseparable(graph: ModelGraph) -> list[range]:
    """Runs of layers that must be in one stage: layers that share parameters, and those between them."""
    return [range(group[0], group[-1] + 1) for group in tied_groups(graph)]


def _stage_figures(
    graph: ModelGraph, inside: range, costs: Sequence[LayerCost], microbatch: int, microbatch_host: float
) -> StageFigures:
    resting = sum(cost.parameters + cost.states for cost in costs)
    backward_peak = worst_moment([terms(cost, 1, 1) for cost in costs], optimizer=False).size - resting
    kept, forward_peak = 0, 0
    for cost in costs:
        forward_peak = max(forward_peak, kept + max(cost.forward_working, cost.kept))
        kept += cost.kept
    return StageFigures(
        forward=sum(cost.forward + cost.forward_exposed for cost in costs),
        backward=sum(cost.backward + cost.backward_exposed for cost in costs),
        recompute=sum(cost.recompute for cost in costs),
        host=sum(cost.host for cost in costs) + microbatch_host,
        update=sum(cost.update + cost.step_exposed for cost in costs),
        update_host=sum(cost.step_host for cost in costs),
        parameters=sum(cost.parameters for cost in costs),
        gradients=sum(cost.gradients + cost.formed_gradients + cost.passing_gradients for cost in costs),
        states=sum(cost.states for cost in costs),
        kept=kept,
        forward_peak=forward_peak,
        backward_peak=int(backward_peak),
        updating=sum(cost.optimizer_working for cost in costs),
        entering=graph.crossing(inside.start) * microbatch if inside.start else 0,
        leaving=graph.crossing(inside.stop) * microbatch if inside.stop < len(graph.layers) else 0,
        carried=graph.borrowed(inside) * microbatch,
    )
