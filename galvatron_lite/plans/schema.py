"""The plan: how every layer is split, what that is predicted to cost, and what it was made from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Annotated

from annotated_types import Interval

from galvatron_lite.files import Strict
from galvatron_lite.limits import (
    DEVICES,
    LAYERS,
    SAMPLES,
    Amount,
    BudgetBytes,
    Devices,
    Name,
    Precision,
    Seconds,
    Share,
    Size,
    StepSeconds,
)
from galvatron_lite.model.graph import Layer
from galvatron_lite.parallelism.backends import Mode as Mode
from galvatron_lite.parallelism.backends import TrainedBy as TrainedBy
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting
from galvatron_lite.parallelism.pipeline.schedule import DEFAULT_SCHEDULE as DEFAULT_SCHEDULE
from galvatron_lite.parallelism.pipeline.schedule import Schedule as Schedule
from galvatron_lite.parallelism.pipeline.times import PassOrder
from galvatron_lite.parallelism.strategy import Strategy

PLAN_VERSION = 1


class Proof(StrEnum):
    """How sure the search is that nothing better exists in its space."""

    PROVEN = "proven"
    FEASIBLE = "feasible"
    GIVEN = "given"


@dataclass(frozen=True, slots=True)
class LayerRun(Strict):
    """Consecutive layers of one stage that share a strategy.

    Attributes:
        first: name of the first layer.
        last: name of the last layer (the same for a single one).
        count: how many layers.
        strategy: what each of them does with the stage's devices.
    """

    first: Name
    last: Name
    count: Annotated[int, Interval(le=LAYERS)]
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class MemoryBreakdown(Strict):
    """Bytes on one device at the stage's worst moment; the parts add up to ``total``.

    Attributes:
        parameters: held at rest, and gathered ones.
        gradients: at rest.
        optimizer: its states.
        activations: kept between forward and backward.
        temporary: the worst moment's working memory.
        communication: gather and reduce buffers.
        context: driver context and library workspaces.
    """

    parameters: Size = 0
    gradients: Size = 0
    optimizer: Size = 0
    activations: Size = 0
    temporary: Size = 0
    communication: Size = 0
    context: Size = 0

    @property
    def total(self) -> int:
        """All parts together."""
        return (
            self.parameters + self.gradients + self.optimizer + self.activations
            + self.temporary + self.communication + self.context
        )  # fmt: skip

    @property
    def tensors(self) -> int:
        """All parts but the context."""
        return self.total - self.context


@dataclass(frozen=True, slots=True)
class TimeBreakdown(Strict):
    """Seconds of one step on the slowest stage; the parts add up to ``total``.

    Attributes:
        forward: compute.
        backward: compute, without recomputation.
        recompute: computing again what was thrown away.
        communication: exposed (not hidden behind compute): tensor, ZeRO, data, redistribution.
        pipeline: waiting for other stages: bubble and exposed transfers.
        optimizer: the update.
        other: fixed host costs, and waiting for the slowest of many devices.
    """

    forward: Seconds = 0.0
    backward: Seconds = 0.0
    recompute: Seconds = 0.0
    communication: Seconds = 0.0
    pipeline: Seconds = 0.0
    optimizer: Seconds = 0.0
    other: Seconds = 0.0

    @property
    def total(self) -> float:
        """All parts together."""
        return (
            self.forward + self.backward + self.recompute + self.communication
            + self.pipeline + self.optimizer + self.other
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stage(Strict):
    """One pipeline stage.

    Attributes:
        runs: its layers, in order.
        memory: predicted bytes on each of its devices.
        microbatch_seconds: predicted forward + backward of one micro-batch.
        device: name of its devices in a cluster of several types; empty where all are alike or a stage has several.
    """

    runs: tuple[LayerRun, ...]
    memory: MemoryBreakdown = MemoryBreakdown()
    microbatch_seconds: Seconds = 0.0
    device: Name = ""


@dataclass(frozen=True, slots=True)
class Cyclic(Strict):
    """Cyclic data parallelism: as many micro-batches as stages, each two time steps behind the one before it."""

    rule: CyclicRule  # which parameters a micro-batch uses. Both train by gradients that are partly one step old
    setting: CyclicSetting  # where its passes run


@dataclass(frozen=True, slots=True)
class BranchPlacement(Strict):
    """An independent branch of the model on devices of its own."""

    name: Name  # of the branch
    roots: tuple[Name, ...]  # paths of the modules that hold its layers, and nothing else, in the order they run
    first: Size  # number of its first device
    devices: Devices  # how many consecutive devices it has
    runs: tuple[LayerRun, ...]  # its layers, in order
    memory: MemoryBreakdown = MemoryBreakdown()  # predicted bytes on each of its devices, for it alone
    seconds: Seconds = 0.0  # predicted time of its passes in a step


@dataclass(frozen=True, slots=True)
class Prediction(Strict):
    """What a step is predicted to cost.

    Attributes:
        step_seconds: one optimizer step.
        time: where it goes.
        samples_per_second: of the whole cluster.
        tokens_per_second: of the whole cluster.
        mfu: model FLOPs utilisation, 0..1: forward and backward FLOPs without recomputation over the devices' peak.
        peak_memory: bytes on the fullest device.
    """

    step_seconds: StepSeconds
    time: TimeBreakdown
    samples_per_second: Amount
    tokens_per_second: Amount
    mfu: Amount
    peak_memory: Size


@dataclass(frozen=True, slots=True)
class Alternative(Strict):
    """A runner-up."""

    summary: str  # what it does, in a line
    step_seconds: StepSeconds  # what it would have cost
    peak_memory: Size  # bytes on its fullest device
    fits: bool  # whether that is within the budget
    # least_seconds, most_seconds: of a step over scenarios (``search.scenarios``); 0.0: not asked for
    least_seconds: Seconds = 0.0
    most_seconds: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Provenance(Strict):
    """What a plan was made from."""

    galvatron: Name  # version of this package
    profile: Name  # name of the profile
    profile_hash: Name  # SHA-256 of its canonical JSON, shortened
    profile_origin: str  # ``measured`` or ``estimated`` and from what
    cluster: Name  # its name
    fingerprint: dict[str, str]  # of the machine the profile was measured on; empty for data-sheet clusters
    budget: BudgetBytes  # bytes a device; the least of them where ``budgets`` are unlike
    proof: Proof  # whether the search proved that no plan of its space is better by more than ``tolerance``
    gap: Share = 0.0  # by the closed form of ``cost.schedule`` no plan takes less than (1 - gap) of this one
    # what an integer programme of the same shape said (``search.certify.ilp``); empty where none was asked
    certificate: str = ""
    # bytes on each type of device by its name, where they are unlike
    budgets: dict[Name, BudgetBytes] = field(default_factory=dict)
    # where a plan that was given is priced otherwise than it says (another batch, model or number of devices), and
    # where results under it are not those of one process (``plans.describe``)
    notes: tuple[str, ...] = ()
    interrupted: bool = False  # whether the user stopped the search before its end
    parameters: Size = 0  # items of the model's parameters, by which another width of it is told; 0: not known
    tolerance: Amount = 0.0  # share of the step time that was given up for a simpler plan at the most
    margin: Share = 0.0  # share of the budget that the prediction keeps free
    # least_seconds, most_seconds: of a step over scenarios (``search.scenarios``); 0.0: not asked for
    least_seconds: Seconds = 0.0
    most_seconds: Seconds = 0.0
    stack: str = ""  # training software whose costs it was priced with (``stacks.catalog``); empty: our own runtime
    # which parameters of a model by name train, as ``--trainable`` and then ``--freeze`` say; empty: all
    trains: tuple[str, ...] = ()
    # written by earlier versions, whose plans, also those in checkpoints, are read; it says nothing any more
    simulated: bool = False

    def budget_of(self, stage: Stage) -> int:
        """Bytes that a device of a stage may take."""
        return self.budgets.get(stage.device, self.budget)


@dataclass(frozen=True, slots=True)
class Plan(Strict):
    """How a model is trained on a cluster.

    Attributes:
        version: of this schema.
        model: name of the model.
        devices: the world size it is made for.
        global_batch: samples a step.
        microbatches: how many parts the global batch is worked through in.
        schedule: order of micro-batches in the pipeline.
        precision: of compute.
        stages: the pipeline in the order the model runs; with ``virtual_stages`` v there are v times the pipeline
            degree of them, and stage i runs on the i-th (modulo the pipeline degree) group of consecutive ranks
            (``zb-v``: forth and back).
        prediction: what it is predicted to cost; None for a plan written by hand.
        alternatives: runner-ups.
        left_out: dimensions that were not offered, and why.
        provenance: what it was made from; None for a plan written by hand.
        virtual_stages: stages that each group of devices runs (interleaved schedules); 1 elsewhere.
        cyclic: how cyclic data parallelism runs; its ``stages`` are then those whose passes go round, as many as
            there are micro-batches. None elsewhere.
        branches: branches on devices of their own; the one stage then holds the other layers.
        mode: what the plan is for.
        backend: what trains by it: this package's own runtime, or DeepSpeed's engine.
        order: what the order of passes of a zero-bubble schedule is made from; None: passes that all take as long.
    """

    version: int
    model: Name
    devices: Annotated[int, Interval(le=DEVICES)]
    global_batch: Annotated[int, Interval(le=SAMPLES)]
    microbatches: Annotated[int, Interval(le=SAMPLES)]
    schedule: Schedule
    precision: Precision
    stages: tuple[Stage, ...]
    prediction: Prediction | None = None
    alternatives: tuple[Alternative, ...] = ()
    left_out: tuple[str, ...] = ()
    provenance: Provenance | None = None
    virtual_stages: Annotated[int, Interval(le=SAMPLES)] = 1
    cyclic: Cyclic | None = None
    branches: tuple[BranchPlacement, ...] = ()
    mode: Mode = Mode.TRAINING
    backend: TrainedBy = TrainedBy.GALVATRON
    order: PassOrder | None = None

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        """The plan of a YAML or JSON file, checked.

        Raises:
            FileFormatError: missing, corrupt, truncated, or of another version.
            InputError: readable, but its numbers contradict one another.
        """
        from galvatron_lite.plans.io import read_plan

        return read_plan(path)

    def save(self, path: Path | str) -> None:
        """Write the plan, once checked, as YAML (or JSON where the name ends so), whole or not at all.

        Raises:
            InputError: its numbers contradict one another.
        """
        from galvatron_lite.plans.io import check_plan, write_plan

        write_plan(check_plan(self), Path(path))

    @property
    def overfull(self) -> tuple[int, ...]:
        """Numbers of the stages that need more than the budget; none where there is no prediction or budget."""
        made_from = self.provenance
        if made_from is None or self.prediction is None:
            return ()
        return tuple(
            number for number, stage in enumerate(self.stages) if stage.memory.total > made_from.budget_of(stage)
        )

    @property
    def fits(self) -> bool | None:
        """Whether every stage is within the budget it was priced with; None where there is no prediction or budget."""
        return None if self.prediction is None or self.provenance is None else not self.overfull

    @property
    def pipeline(self) -> int:
        """Groups of devices that the stages are spread over; 1 where every device runs all stages."""
        if self.cyclic is not None and self.cyclic.setting is not CyclicSetting.STAGES:
            return 1
        return len(self.stages) // self.virtual_stages

    @property
    def microbatch(self) -> int:
        """Samples of one micro-batch, over all devices of a stage."""
        return self.global_batch // self.microbatches

    @property
    def stage_devices(self) -> int:
        """Devices that share one pass of a stage; one under cyclic data parallelism, however many run the stage."""
        return 1 if self.cyclic is not None else self.devices // self.pipeline


def layer_runs(layers: Sequence[Layer], strategies: Sequence[Strategy]) -> Iterator[LayerRun]:
    """Neighbouring layers of equal strategy as one run each."""
    place = 0
    for strategy, same in groupby(strategies):
        count = len(list(same))
        yield LayerRun(layers[place].name, layers[place + count - 1].name, count, strategy)
        place += count
