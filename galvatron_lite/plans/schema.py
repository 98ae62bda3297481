"""The plan: how every layer is split, its predicted cost, and its provenance."""

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
    """What a search proves: that no plan of its space is better, or only that this one is feasible."""

    PROVEN = "proven"
    FEASIBLE = "feasible"
    GIVEN = "given"


@dataclass(frozen=True, slots=True)
class LayerRun(Strict):
    """Consecutive layers of one stage that share a strategy.

    Attributes:
        first: name of the first layer.
        last: name of the last layer; the same for a single layer.
        count: number of layers.
        strategy: of each layer, on the devices of the stage.
    """

    first: Name
    last: Name
    count: Annotated[int, Interval(le=LAYERS)]
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class MemoryBreakdown(Strict):
    """Bytes on one device of a stage at its worst moment; the parts add up to ``total``.

    Attributes:
        parameters: at rest, and gathered.
        gradients: at rest.
        optimizer: optimizer states.
        activations: saved from forward to backward.
        temporary: working memory at the worst moment.
        communication: buffers of gathers and reductions.
        context: driver context and workspaces of libraries.
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
        """The sum of all parts."""
        return (
            self.parameters + self.gradients + self.optimizer + self.activations
            + self.temporary + self.communication + self.context
        )  # fmt: skip

    @property
    def tensors(self) -> int:
        """The sum of all parts except the context."""
        return self.total - self.context


@dataclass(frozen=True, slots=True)
class TimeBreakdown(Strict):
    """Seconds of one step on the slowest stage; the parts add up to ``total``.

    Attributes:
        forward: compute.
        backward: compute, without recomputation.
        recompute: recomputation in backward.
        communication: exposed (not hidden behind compute): tensor, ZeRO, data, redistribution.
        pipeline: bubble, and exposed transfers between stages.
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
        """The sum of all parts."""
        return (
            self.forward + self.backward + self.recompute + self.communication
            + self.pipeline + self.optimizer + self.other
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stage(Strict):
    """One pipeline stage.

    Attributes:
        runs: its layers, in order.
        memory: predicted bytes on each device.
        microbatch_seconds: predicted seconds of forward and backward of one micro-batch.
        device: type of its devices in a cluster of several types; empty if there is one type, or the stage has several.
    """

    runs: tuple[LayerRun, ...]
    memory: MemoryBreakdown = MemoryBreakdown()
    microbatch_seconds: Seconds = 0.0
    device: Name = ""


@dataclass(frozen=True, slots=True)
class Cyclic(Strict):
    """Cyclic data parallelism: as many micro-batches as stages, each two time steps after the one before it."""

    rule: CyclicRule  # which parameters a micro-batch uses; gradients are partly one step old under both
    setting: CyclicSetting  # where its passes run


@dataclass(frozen=True, slots=True)
class BranchPlacement(Strict):
    """An independent branch of the model on devices of its own."""

    name: Name
    roots: tuple[Name, ...]  # paths of the modules that hold its layers and no others, in the order they run
    first: Size  # number of its first device
    devices: Devices  # number of its consecutive devices
    runs: tuple[LayerRun, ...]  # its layers, in order
    memory: MemoryBreakdown = MemoryBreakdown()  # predicted bytes on each of its devices, without other layers
    seconds: Seconds = 0.0  # predicted, of its passes in a step


@dataclass(frozen=True, slots=True)
class Prediction(Strict):
    """The predicted cost of a step.

    Attributes:
        step_seconds: seconds of one optimizer step.
        time: the parts of the step.
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

    summary: str  # the plan in a line
    step_seconds: StepSeconds
    peak_memory: Size  # bytes on its fullest device
    fits: bool  # whether it is within the budget
    least_seconds: Seconds = 0.0  # of a step over all scenarios (``search.scenarios``); 0.0: not computed
    most_seconds: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Provenance(Strict):
    """What a plan was made from, and how sure it is."""

    galvatron: Name  # version of this package
    profile: Name  # name of the profile
    profile_hash: Name  # SHA-256 of its canonical JSON, shortened
    profile_origin: str  # ``measured`` or ``estimated``, and its source
    cluster: Name  # name of the cluster
    fingerprint: dict[str, str]  # of the machine the profile was measured on; empty for data sheets
    budget: BudgetBytes  # bytes a device; the least of ``budgets`` if there are several
    proof: Proof  # whether no plan of the search space is better by more than ``tolerance``
    gap: Share = 0.0  # by the closed form of ``cost.schedule`` no plan takes less than (1 - gap) of this one
    certificate: str = ""  # result of the integer program (``search.certify.ilp``); empty if there was none
    budgets: dict[Name, BudgetBytes] = field(default_factory=dict)  # by type of device, if they differ
    # on prices for another batch, model or device count than the plan's, and on results that differ from those of one
    # process (``plans.describe``)
    notes: tuple[str, ...] = ()
    interrupted: bool = False  # whether the user stopped the search
    parameters: Size = 0  # of the model, in items; 0: not known
    tolerance: Amount = 0.0  # share of the step time that may be given up for a simpler plan
    margin: Share = 0.0  # share of the budget that the prediction keeps free
    least_seconds: Seconds = 0.0  # of a step over all scenarios (``search.scenarios``); 0.0: not computed
    most_seconds: Seconds = 0.0
    stack: str = ""  # training software with whose costs it was priced (``stacks.catalog``); empty: our own runtime
    trains: tuple[str, ...] = ()  # of a model by name: ``--trainable``, then every ``--freeze``; empty: all trains
    simulated: bool = False  # not used: plans and checkpoints of earlier versions hold it

    def budget_of(self, stage: Stage) -> int:
        """The budget of a stage's devices, in bytes."""
        return self.budgets.get(stage.device, self.budget)


@dataclass(frozen=True, slots=True)
class Plan(Strict):
    """How a model is trained on a cluster.

    Attributes:
        version: version of this schema.
        model: name of the model.
        devices: number of devices, the world size.
        global_batch: samples a step.
        microbatches: number of micro-batches of the global batch.
        schedule: order of micro-batches in the pipeline.
        precision: precision of compute.
        stages: the pipeline in the order of the model. With ``virtual_stages`` v there are v times the pipeline degree
            of them, and stage i runs on the i-th (modulo the pipeline degree) group of consecutive ranks (``zb-v``:
            back and forth).
        prediction: predicted cost; None for a plan written by hand.
        alternatives: runners-up.
        left_out: dimensions that were not offered, and why.
        provenance: what it was made from; None for a plan written by hand.
        virtual_stages: stages that each group of devices runs (interleaved schedules); else 1.
        cyclic: settings of cyclic data parallelism, which has as many micro-batches as stages; else None.
        branches: branches on devices of their own; the one stage then has the other layers.
        mode: training or inference.
        backend: what trains with it: this package's runtime, or DeepSpeed's engine.
        order: durations from which the order of passes of a zero-bubble schedule is made; None: equal durations.
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
        """Read and check a plan from a YAML or JSON file.

        Raises:
            FileFormatError: missing, corrupt, truncated, or of another version.
            InputError: readable, but its numbers contradict one another.
        """
        from galvatron_lite.plans.io import read_plan

        return read_plan(path)

    def save(self, path: Path | str) -> None:
        """Check the plan, and write it as YAML, or JSON if the name ends so, atomically.

        Raises:
            InputError: its numbers contradict one another.
        """
        from galvatron_lite.plans.io import check_plan, write_plan

        write_plan(check_plan(self), Path(path))

    @property
    def overfull(self) -> tuple[int, ...]:
        """Numbers of the stages that exceed the budget; empty if there is no prediction or budget."""
        source = self.provenance
        if source is None or self.prediction is None:
            return ()
        return tuple(number for number, stage in enumerate(self.stages) if stage.memory.total > source.budget_of(stage))

    @property
    def fits(self) -> bool | None:
        """Whether every stage is within its budget; None if there is no prediction or budget."""
        return None if self.prediction is None or self.provenance is None else not self.overfull

    @property
    def pipeline(self) -> int:
        """The pipeline degree: groups of devices that run the stages; 1 if every device runs all stages."""
        if self.cyclic is not None and self.cyclic.setting is not CyclicSetting.STAGES:
            return 1
        return len(self.stages) // self.virtual_stages

    @property
    def microbatch(self) -> int:
        """Samples of one micro-batch, on all devices of a stage together."""
        return self.global_batch // self.microbatches

    @property
    def stage_devices(self) -> int:
        """Devices that share one pass of a stage; 1 under cyclic data parallelism."""
        return 1 if self.cyclic is not None else self.devices // self.pipeline


def layer_runs(layers: Sequence[Layer], strategies: Sequence[Strategy]) -> Iterator[LayerRun]:
    """Group consecutive layers of the same strategy into runs."""
    start = 0
    for strategy, equal in groupby(strategies):
        count = len(list(equal))
        yield LayerRun(layers[start].name, layers[start + count - 1].name, count, strategy)
        start += count
