"""What a plan of cyclic data parallelism costs: its programme, simulated in steady state, and what devices hold then.

The seconds of a step are those of the loop (``parallelism.cyclic.simulation``) and the fixed host time of a step;
start-up takes 2(N-1) more time steps, once a run, and is not part of it. Every pass takes its layers' seconds and the
host time of what it receives and sends; messages travel beside compute (the share of them that ``Profile.hidden`` says,
all if it says nothing), and count where somebody waits for them. Memory is that of the worst pass of any device: what
is there besides (``parallelism.cyclic.simulation``) and the pass's own worst moment. Figures of rest: arXiv 2403.08837.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from galvatron_lite.cluster.cluster import Collective, RankGroup
from galvatron_lite.cost.layer import ALONE, LayerCost, LayerPricer
from galvatron_lite.cost.memory import terms, worst_moment
from galvatron_lite.cost.stage import sharing_of, tied_groups
from galvatron_lite.cost.step import straggling, strategies_of
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.parallelism.base import Communication
from galvatron_lite.parallelism.base import Moment as When
from galvatron_lite.parallelism.cyclic.programme import CyclicMessage, CyclicProgramme, MessageContent
from galvatron_lite.parallelism.cyclic.rules import CyclicSetting
from galvatron_lite.parallelism.cyclic.simulation import (
    CyclicSlot,
    Holding,
    Loop,
    beside,
    equal_cuts,
    holdings,
    loop_of,
    round_seconds,
)
from galvatron_lite.parallelism.pipeline.cost import stride_between
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import check_plan
from galvatron_lite.plans.schema import Cyclic, MemoryBreakdown, Plan, Prediction, TimeBreakdown

NAME = "cyclic"
"""Cause of its messages, in the keys of ``Profile.hidden``."""


def price_cyclic(pricer: LayerPricer, plan: Plan) -> Plan:
    """The plan with its prediction filled in; see the module.

    Every stage carries the memory of the devices that run it: all of them where each device runs all stages.

    Raises:
        InputError: the plan does not fit the profile's model, its numbers contradict one another, or layers of two
            stages share parameters.
    """
    priced = price(pricer, plan)
    memory = priced.memory()
    stages = tuple(
        replace(
            stage,
            memory=memory[number],
            microbatch_seconds=priced_stage.forward
            + priced_stage.backward
            + priced_stage.recompute
            + priced_stage.host,
        )
        for number, (stage, priced_stage) in enumerate(zip(plan.stages, priced.stages, strict=True))
    )
    return replace(plan, stages=stages, prediction=priced.prediction(plan, memory))


def price(pricer: LayerPricer, plan: Plan) -> CyclicFigures:
    """Figures of a plan's stages, and its programme; raises what ``price_cyclic`` does."""
    check_plan(plan)
    if plan.cyclic is None:
        raise InputError("plan, cyclic", None, "Say the rule and the setting.")
    if any(strategy != Strategy() for strategy in strategies_of(plan, pricer.profile)):
        raise InputError("strategy", "cyclic", "Under cyclic data parallelism every layer is whole: on one device.")
    cuts = (0, *accumulate(sum(run.count for run in stage.runs) for stage in plan.stages))
    return CyclicFigures(pricer, plan.cyclic, tuple(stage_figures(pricer, cuts, plan.microbatch)))


@dataclass(frozen=True, slots=True)
class CyclicFigures:
    """A plan's figures."""

    pricer: LayerPricer  # of the profile
    cyclic: Cyclic  # rule and setting
    stages: tuple[StageFigures, ...]  # their figures
    # seconds of messages by bytes and place
    message_times: dict[tuple[int, RankGroup], float] = field(default_factory=dict)

    @property
    def loop(self) -> Loop:
        """What is done over and over."""
        return loop_of(self.cyclic.rule, self.cyclic.setting, len(self.stages))

    @property
    def held(self) -> tuple[Holding, ...]:
        """What devices hold at each pass of it."""
        return holdings(self.cyclic.rule, self.cyclic.setting, len(self.stages))

    def prediction(self, plan: Plan, memory: Sequence[MemoryBreakdown]) -> Prediction:
        """Step time and memory of the plan."""
        profile = self.pricer.profile
        time = self.time(straggling(profile, plan.devices))
        samples = plan.global_batch / time.total
        return Prediction(
            step_seconds=time.total,
            time=time,
            samples_per_second=samples,
            tokens_per_second=samples * profile.graph.sequence,
            mfu=profile.graph.flops * samples / profile.cluster.peak(profile.graph.precision, plan.devices),
            peak_memory=max(stage_memory.total for stage_memory in memory),
        )

    def time(self, factor: float = 1.0) -> TimeBreakdown:
        """Seconds of a step of the busiest device; what is not its own work is waiting: for messages under way, the
        rest for other devices.

        Args:
            factor: on all of it, for the slowest of many.
        """
        loop, fixed = self.loop, self.pricer.profile.overhead.step
        sends = [self.message_seconds(message) for message in loop.messages]
        passes = [self.pass_seconds(slot, sends) for slot in loop.slots]
        step = round_seconds(loop, passes, sends)
        alone = round_seconds(loop, passes, [0.0] * len(sends))
        longest = max(self._work_by_process().values(), key=lambda work: work.total)
        shown = (1.0 - self._hidden) * sum(sends) / len({slot.process for slot in loop.slots})
        longest = replace(longest, communication=longest.communication + shown)
        waiting = max(alone - longest.total, 0.0)
        total = (step + fixed) * factor
        return replace(
            longest,
            communication=longest.communication + max(step - longest.total - waiting, 0.0),
            pipeline=waiting,
            other=longest.other + fixed + total - (step + fixed),
        )

    @property
    def _hidden(self) -> float:
        return self.pricer.profile.hidden.get(NAME, 1.0)

    def pass_seconds(self, slot: CyclicSlot, sends: Sequence[float]) -> float:
        """Seconds that a pass takes its process, with the host time of its messages and updates of parameters.

        Args:
            slot: the pass.
            sends: seconds of every message of the loop.
        """
        stage = self.stages[slot.does.moment.stage]
        compute = stage.backward + stage.recompute if slot.does.moment.backward else stage.forward
        shown = (1.0 - self._hidden) * sum(sends[message] for message in slot.sends)
        return compute + stage.host / 2 + self._moving(slot) + self._updating(slot) + shown

    def _moving(self, slot: CyclicSlot) -> float:
        """Host time of messages."""
        return (len(slot.receives) + len(slot.sends)) * self.pricer.profile.overhead.pipeline

    def _updating(self, slot: CyclicSlot) -> float:
        """Seconds of updates: where each process makes its own before forward, or of the pass that ends the sum."""
        stage, setting = self.stages[slot.does.moment.stage], self.cyclic.setting
        count = slot.does.finishes if setting is CyclicSetting.SINGLE else len(slot.does.applies)
        return count * (stage.update + stage.update_host)

    def _work_by_process(self) -> Mapping[int, TimeBreakdown]:
        """What each process does itself in a step; under ``stages`` each process of a stage its share of them."""
        work: dict[int, TimeBreakdown] = {}
        programme = CyclicProgramme(self.cyclic.rule, self.cyclic.setting, len(self.stages))
        turns = self.cyclic.setting is CyclicSetting.STAGES
        for slot in self.loop.slots:
            stage, backward = self.stages[slot.does.moment.stage], slot.does.moment.backward
            share = programme.replicas(slot.does.moment.stage) if turns else 1
            key = slot.does.moment.stage if turns else slot.process
            so_far = work.get(key, TimeBreakdown())
            updates = self._updating(slot)
            both = stage.update_host + stage.update
            host = updates * (stage.update_host / both if both else 0.0)
            work[key] = TimeBreakdown(
                so_far.forward + (0.0 if backward else stage.forward / share),
                so_far.backward + (stage.backward / share if backward else 0.0),
                so_far.recompute + (stage.recompute / share if backward else 0.0),
                optimizer=so_far.optimizer + (updates - host) / share,
                other=so_far.other + (stage.host / 2 + self._moving(slot) + host) / share,
            )
        return work

    def message_bytes(self, message: CyclicMessage) -> int:
        """What a message holds."""
        stage = self.stages[message.stage]
        if message.kind is MessageContent.ACTIVATION:
            return stage.leaving
        if message.kind is MessageContent.GRADIENT:
            return stage.entering
        return stage.gradients

    def message_seconds(self, message: CyclicMessage) -> float:
        """Seconds from its being sent to its arrival; of the farthest pair where the processes of a stage take turns.

        In every time step about as many messages are under way as there are workers.
        """
        node, count = self.pricer.profile.cluster.levels[0].size, len(self.stages)
        places = self._places(message)
        stride = stride_between(min(places), max(places), 1, node)
        near = stride == 1
        at_once = max(1, min(count, node) // 2) if near else (count if self._turning else 1)
        return self._sent(self.message_bytes(message), RankGroup(2, stride, at_once))

    def _sent(self, size: int, group: RankGroup) -> float:
        """Seconds of a message, worked out once."""
        if (size, group) not in self.message_times:
            sent = Communication(Collective.SEND_RECV, size, group, When.FORWARD, overlaps=True, cause=NAME)
            self.message_times[size, group] = self.pricer.links.seconds(sent)
        return self.message_times[size, group]

    @property
    def _turning(self) -> bool:
        return self.cyclic.setting is CyclicSetting.STAGES

    def _places(self, message: CyclicMessage) -> tuple[int, ...]:
        """The first and last of the processes that may send and receive it, in turn."""
        if not self._turning:
            return message.source, message.target
        other = {MessageContent.ACTIVATION: message.stage + 1, MessageContent.GRADIENT: message.stage - 1}.get(
            message.kind, message.stage
        )
        programme = CyclicProgramme(self.cyclic.rule, self.cyclic.setting, len(self.stages))
        firsts = [programme.process_of(stage, 0) for stage in (message.stage, other)]
        return *firsts, *(
            first + programme.replicas(stage) - 1 for first, stage in zip(firsts, (message.stage, other), strict=True)
        )

    def memory(self) -> list[MemoryBreakdown]:
        """Bytes on the fullest of the devices that run each stage, at its worst moment."""
        moments = [(holding.does.moment.stage, self._moment(holding)) for holding in self.held]
        if not self._turning:
            return [_fullest(memory for _, memory in moments)] * len(self.stages)
        return [
            _fullest(memory for stage, memory in moments if stage == number) for number in range(len(self.stages))
        ]  # fmt: skip

    def _moment(self, holding: Holding) -> MemoryBreakdown:
        """Bytes on a device at the worst moment of one pass: of the pass itself, of the update beside it, or of copying
        what it sends. An update that a forward pass passes on is copied before it."""
        one, backward = holding.does, holding.does.moment.backward
        stage = self.stages[one.moment.stage]
        rest = self._beside(holding)
        working = stage.back - stage.gradients if backward else stage.ahead
        early = 0 if backward else self._bytes_of(sent for sent in one.sends if sent.kind is MessageContent.UPDATE)
        late = self._bytes_of(one.sends)
        moments = (
            (stage.kept, max(working - stage.kept, 0), early),
            (0, stage.updating if self._updates(holding) else 0, early),
            (0 if backward else stage.kept, 0, late),
        )
        kept, temporary, copied = max(moments, key=sum)
        return replace(
            rest,
            gradients=rest.gradients + (stage.gradients if backward else 0),
            activations=rest.activations + kept,
            temporary=temporary,
            communication=rest.communication + copied,
        )

    def _beside(self, holding: Holding) -> MemoryBreakdown:
        """What is there throughout a pass besides what it makes."""
        stages = self.stages
        gradients = sum(stages[stage].gradients for stage in holding.sums)
        gradients += sum(count * stages[stage].gradients for stage, count in holding.updates)
        own = stages[holding.does.moment.stage]
        copied = own.copied if self._turning else 0
        return MemoryBreakdown(
            parameters=sum(count * stages[stage].parameters for stage, count in holding.versions),
            gradients=gradients,
            optimizer=sum(stages[stage].states for stage, _ in holding.versions),
            activations=sum(count * stages[stage].kept for stage, count in holding.live) + copied,
            communication=self._bytes_of((*beside(holding.does), *holding.waiting, *holding.coming)),
            context=self.pricer.profile.cluster.device.context,
        )

    def _bytes_of(self, messages: Iterable[CyclicMessage]) -> int:
        return sum(map(self.message_bytes, messages))

    def _updates(self, holding: Holding) -> bool:
        alone = self.cyclic.setting is CyclicSetting.SINGLE
        return holding.does.finishes if alone else bool(holding.does.applies)


def _fullest(memories: Iterable[MemoryBreakdown]) -> MemoryBreakdown:
    return max(memories, key=lambda memory: memory.total)


WHOLE = Strategy()
"""What every layer does: all of it on one device."""


@dataclass(frozen=True, slots=True)
class StageFigures:
    """What one stage costs one device."""

    forward: float  # forward, backward: seconds of compute of a micro-batch; backward without ``recompute``
    backward: float
    recompute: float  # seconds of computing again
    host: float  # seconds of fixed host work a micro-batch, half in either pass
    update: float  # seconds of the optimizer
    update_host: float  # seconds of fixed host work an update
    parameters: int  # bytes of one version, buffers included
    gradients: int  # bytes of its gradients
    states: int  # bytes of optimizer states
    kept: int  # bytes from forward to backward, a micro-batch
    ahead: int  # bytes live at the worst moment of forward, beyond parameters and what other stages keep
    back: int  # the same of backward, its own gradients among them
    updating: int  # temporary bytes of the optimizer
    entering: int  # entering, leaving: bytes of the tensors that cross its two boundaries, a micro-batch
    leaving: int
    copied: int  # bytes of a micro-batch that it keeps of tensors made before it, where it runs on devices of its own


def stage_figures(pricer: LayerPricer, cuts: Sequence[int], microbatch: int) -> list[StageFigures]:
    """Figures of all stages.

    Args:
        pricer: of the profile.
        cuts: places where stages begin, and the number of layers.
        microbatch: samples.

    Raises:
        InputError: the profile holds no point of a whole layer, or layers of two stages share parameters.
    """
    graph = pricer.profile.graph
    check_shared(graph, cuts)
    layers = layer_costs(pricer, microbatch)
    return [
        _figures(graph, range(start, stop), layers[start:stop], microbatch, pricer.profile.overhead.microbatch)
        for start, stop in pairwise(cuts)
    ]


def layer_costs(pricer: LayerPricer, microbatch: int) -> list[LayerCost]:
    """Cost of every layer, whole on one device.

    Raises:
        InputError: the profile holds no point of one.
    """
    graph, costs = pricer.profile.graph, list[LayerCost]()
    shared = sharing_of(graph, range(len(graph.layers)))
    for place, layer in enumerate(graph.layers):
        cost = pricer.price(layer.kind, WHOLE, microbatch, 1, shared.get(place, ALONE))
        if cost is None:
            raise InputError(f"strategy of {layer.name}", str(WHOLE), "The profile has no figures of it whole.")
        costs.append(cost)
    return costs


def split(pricer: LayerPricer, stages: int, microbatch: int) -> tuple[int, ...]:
    """Stages of equal time, forward and backward: where they begin, and the number of layers; empty where the model
    has too few layers that can be apart.

    Raises:
        InputError: the profile holds no point of a whole layer.
    """
    graph = pricer.profile.graph
    if graph.whole and stages > 1:
        return ()
    costs = layer_costs(pricer, microbatch)
    return equal_cuts([cost.forward_seconds + cost.backward_seconds for cost in costs], stages, _joined(graph))


def check_shared(graph: ModelGraph, cuts: Sequence[int]) -> None:
    """Raise InputError where layers of two stages share parameters: versions of one would be of two times."""
    for run in _joined(graph):
        cut = next((cut for cut in cuts if run.start < cut < run.stop), None)
        if cut is not None:
            first, last = graph.layers[run.start].name, graph.layers[run.stop - 1].name
            remedy = f"A stage may not begin at {graph.layers[cut].name}: {first} and {last} share parameters."
            raise InputError("stages", "cyclic", remedy)


def _joined(graph: ModelGraph) -> list[range]:
    """Layers that share parameters, and those between them."""
    return [range(group[0], group[-1] + 1) for group in tied_groups(graph)]


def _figures(
    graph: ModelGraph, inside: range, costs: Sequence[LayerCost], microbatch: int, fixed: float
) -> StageFigures:
    resting = sum(cost.parameters + cost.states for cost in costs)
    backward = worst_moment([terms(cost, 1, 1) for cost in costs], optimizer=False).size - resting
    before, ahead = 0, 0
    for cost in costs:
        ahead = max(ahead, before + max(cost.forward_working, cost.kept))
        before += cost.kept
    return StageFigures(
        forward=sum(cost.forward + cost.forward_exposed for cost in costs),
        backward=sum(cost.backward + cost.backward_exposed for cost in costs),
        recompute=sum(cost.recompute for cost in costs),
        host=sum(cost.host for cost in costs) + fixed,
        update=sum(cost.update + cost.step_exposed for cost in costs),
        update_host=sum(cost.step_host for cost in costs),
        parameters=sum(cost.parameters for cost in costs),
        gradients=sum(cost.gradients + cost.formed_gradients + cost.passing_gradients for cost in costs),
        states=sum(cost.states for cost in costs),
        kept=before,
        ahead=ahead,
        back=int(backward),
        updating=sum(cost.optimizer_working for cost in costs),
        entering=graph.crossing(inside.start) * microbatch if inside.start else 0,
        leaving=graph.crossing(inside.stop) * microbatch if inside.stop < len(graph.layers) else 0,
        copied=graph.borrowed(inside) * microbatch,
    )
