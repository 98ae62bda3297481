"""Backends: what can run a plan, and the strategies and schedules that each supports. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import attrgetter

from galvatron_lite.errors import InputError, unknown
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.pipeline.schedule import Schedule, schedules
from galvatron_lite.parallelism.registry import added_dimensions
from galvatron_lite.parallelism.strategy import Offload, Strategy


class Mode(StrEnum):
    """What a plan is for."""

    TRAINING = "training"
    INFERENCE = "inference"


class TrainedBy(StrEnum):
    """The engine that trains a plan."""

    GALVATRON = "galvatron"
    DEEPSPEED = "deepspeed"


@dataclass(frozen=True, slots=True)
class Backend:
    """What an engine, or other software, supports.

    Attributes:
        name: of ``--backend`` or ``--for``.
        pipeline: whether it runs a pipeline schedule.
        values: the values of fields of ``Strategy`` that it runs; other fields may have any value.
        missing: what it does not support, one line each, printed with each plan.
        rule: whether it runs a combination of values; None: all combinations.
        pipelines: the modes in which it runs several stages.
        modes: the modes in which it runs plans.
        pictures: whether it trains networks whose blocks work on pictures.
        uniform: fields of ``Strategy`` with the same value in all layers with parameters; the search tries each value
            (``search.families.family``).
        block_uniform: further fields with the same value in all blocks.
        block_rule: like ``rule``, of blocks only.
        edges: fields of the layers around the blocks, with their values; None: the values of the blocks.
        piped: values of ``uniform`` fields in pipelines; other fields may have any value.
        alone: the same without a pipeline.
        even: whether all stages have the same number of blocks, the first and last perhaps one fewer.
        stack: the software whose costs are estimated; empty: this package's runtime.
        beside: whether it runs plans that are not stages in the order of the model: branches on separate devices, and
            delayed gradients.
        split_backward: fields of ``Strategy`` with the value that schedules with a split backward require.
        reserved: fields of ``Strategy`` with the value that the search uses while a plan fits, unless one is pinned.
    """

    name: str
    pipeline: Callable[[Schedule], bool]
    values: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    rule: Callable[[Strategy], bool] | None = None
    pipelines: tuple[Mode, ...] = tuple(Mode)
    modes: tuple[Mode, ...] = tuple(Mode)
    pictures: bool = True
    uniform: tuple[str, ...] = ()
    block_uniform: tuple[str, ...] = ()
    block_rule: Callable[[Strategy], bool] | None = None
    edges: tuple[tuple[str, object], ...] = ()
    piped: tuple[tuple[str, tuple[object, ...]], ...] = ()
    alone: tuple[tuple[str, tuple[object, ...]], ...] = ()
    even: bool = False
    stack: str = ""
    beside: bool = True
    split_backward: tuple[tuple[str, object], ...] = ()
    reserved: Mapping[str, object] = field(default_factory=dict)

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """The pipeline schedules it runs."""
        return tuple(filter(self.pipeline, schedules()))

    def required(self, schedule: Schedule) -> tuple[tuple[str, object], ...]:
        """Return fields of ``Strategy`` with the value that a schedule requires."""
        return self.split_backward if schedule.splits_backward else ()

    def leaves_out(self, mode: Mode) -> tuple[str, ...]:
        """Return what it does not support in a mode, one line each."""
        if mode in self.pipelines:
            return self.missing
        return (*self.missing, f"{self.name} runs no pipelines in {mode.value} (--backend {ANY.name} prices them)")

    @property
    def limits(self) -> Mapping[str, tuple[object, ...]]:
        """``values``, and those of added dimensions (``registry.add``)."""
        if self.name in (GALVATRON.name, ANY.name) or not added_dimensions():
            return self.values
        unsupported = (dimension for dimension in added_dimensions() if self.name not in dimension.software)
        return {**{dimension.name: (1,) for dimension in unsupported}, **self.values}

    def runs(self, strategy: Strategy) -> bool:
        """Whether it trains with a strategy."""
        supported = all(getattr(strategy, name) in values for name, values in self.limits.items())
        return supported and self.combines(strategy)

    def combines(self, strategy: Strategy) -> bool:
        """Whether it runs the combination of a strategy's values, each of which it runs."""
        return self.rule is None or self.rule(strategy)


def _trains(strategy: Strategy) -> bool:
    """Whether this package's runtime runs a combination of values.

    Only one of matmuls, pixels, filters and channels is shared. Offloaded activations exclude selective recomputation,
    whose cache cannot be offloaded. Experts are spread only beside shared matmuls: sliced by the full tensor group, or
    unsliced if that group shares tokens; and not with offloaded activations if ZeRO gathers parameters.
    """
    if strategy.offloads_activations and strategy.recompute is Recompute.SELECTIVE:
        return False
    degrees = [strategy.tensor, strategy.spatial, strategy.filters, strategy.channels]
    if strategy.expert == 1:
        return degrees.count(1) >= 3
    if strategy.offloads_activations and strategy.zero_stage > 1:
        return False
    ranks = strategy.expert * strategy.tensor if strategy.expert_tensor == 0 else strategy.expert
    unsliced = strategy.expert_tensor == 1 and strategy.tensor > 1 and strategy.sequence_parallel
    return degrees[1:] == [1, 1, 1] and strategy.devices % ranks == 0 and (strategy.expert_tensor == 0 or unsliced)


SPLIT_BACKWARD: tuple[tuple[str, object], ...] = (
    ("zero", 1), ("offload", Offload.NONE), ("depth", 1), ("height", 1), ("width", 1), ("filters", 1), ("channels", 1),
)  # fmt: skip
"""Values that a split backward requires: ZeRO reduces gradients and offload copies them at the end of backward, before
gradients of weights exist; operators on shares of pixels and channels compute gradients of weights in backward."""
_EXECUTABLE: Callable[[Schedule], bool] = attrgetter("executable")
GALVATRON = Backend(
    "galvatron",
    _EXECUTABLE,
    {},
    ("galvatron uses host memory only where nothing fits without it, or on request (--fix offload=...)",),
    rule=_trains,
    split_backward=SPLIT_BACKWARD,
    reserved={"offload": Offload.NONE},
)
"""What ``auto_parallelize`` trains with."""
ANY = Backend(
    "any",
    _EXECUTABLE,
    missing=("any offers all that is priced; host memory is taken as large enough for what is offloaded",),
)
"""All that can be priced: plans for other software, or to see what it would gain."""
DEEPSPEED = Backend(
    TrainedBy.DEEPSPEED.value,
    attrgetter("simple"),
    {
        **dict.fromkeys(("tensor", "context", "expert", "depth", "height", "width", "filters", "channels"), (1,)),
        "offload": (Offload.NONE, Offload.STATES),
    },
    (
        "deepspeed trains with one ZeRO stage over all devices, and leaves out tensor, context and expert parallelism, "
        "shares of pixels and channels, and replicas of shards",
        "ZeRO-2 is priced as FSDP2's, which gathers parameters in every micro-batch; DeepSpeed's gathers them once a "
        "step and holds them all the time",
    ),
    rule=lambda strategy: strategy.data == 1 or strategy.zero == 1,
    pipelines=(),
    modes=(Mode.TRAINING,),
    uniform=("zero_stage", "offload"),
    beside=False,
)
"""What DeepSpeed's engine trains with."""


def _megatron(strategy: Strategy) -> bool:
    """All replicas shard optimizer states (the distributed optimizer), and nothing else."""
    return strategy.data == 1 and strategy.zero_stage == (strategy.zero * strategy.context > 1)


def _fully_sharded(strategy: Strategy) -> bool:
    """FSDP2 shards states over all replicas; experts are unsliced, and spread over the ranks of one replica."""
    spread = strategy.expert == 1 or (
        (strategy.tensor == 1 or strategy.expert_tensor == 1)
        and strategy.zero * strategy.context * strategy.tensor % strategy.expert == 0
    )
    return (strategy.zero_stage > 0) == (strategy.zero * strategy.context > 1) and spread


def _sequence_parallel(strategy: Strategy) -> bool:
    """Tensor groups of blocks also share tokens between matmuls."""
    return strategy.sequence_parallel == (strategy.tensor > 1)


_TRANSFORMERS_ALONE: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("depth", "height", "width", "filters", "channels"), (1,)),
    "offload": (Offload.NONE,),
}
"""Values of tools for language models."""
_BY_BLOCK = ("sequence_parallel", "expert", "expert_tensor", "recompute")
MEGATRON = Backend(
    "megatron",
    lambda schedule: "megatron" in schedule.software,
    {**_TRANSFORMERS_ALONE, "offload": (Offload.NONE, Offload.STATES)},
    rule=_megatron,
    modes=(Mode.TRAINING,),
    uniform=("tensor", "context", "ulysses", "offload"),
    block_uniform=_BY_BLOCK,
    block_rule=_sequence_parallel,
    edges=(("recompute", Recompute.NONE), ("sequence_parallel", None)),
    beside=False,
    reserved={"offload": Offload.NONE},
    stack="megatron-core",
    pictures=False,
)
"""Megatron-LM: the distributed optimizer, and one strategy for all layers."""
NEMO = replace(MEGATRON, name="nemo", stack="megatron-bridge")
"""NeMo's recipes, which train with Megatron-Bridge."""
TORCHTITAN = Backend(
    "torchtitan",
    lambda schedule: "torchtitan" in schedule.software,
    {**_TRANSFORMERS_ALONE, "ulysses": (False,)},
    rule=_fully_sharded,
    modes=(Mode.TRAINING,),
    uniform=("data", "tensor", "context", "zero_stage"),
    # torch.distributed.pipelining gathers parameters and reduces gradients once a step, as ZeRO-1 does
    # (backward_maybe_with_nosync)
    piped=(("zero_stage", (0, 1)),),
    alone=(("zero_stage", (0, 2, 3)),),
    block_uniform=_BY_BLOCK,
    block_rule=_sequence_parallel,
    edges=MEGATRON.edges,
    beside=False,
    even=True,
    stack="torchtitan",
    pictures=False,
)
"""torchtitan's command line: FSDP2, and one strategy for all layers."""
ACCELERATE = Backend(
    "accelerate",
    attrgetter("simple"),
    {
        **_TRANSFORMERS_ALONE,
        "ulysses": (False,),
        "expert": (1,),
        "sequence_parallel": (False,),
        "zero_stage": (0, 2, 3),
    },
    ("accelerate runs no pipelines",),
    rule=_fully_sharded,
    pipelines=(),
    modes=(Mode.TRAINING,),
    uniform=("data", "tensor", "context", "zero_stage"),
    block_uniform=("recompute",),
    block_rule=lambda strategy: strategy.recompute is not Recompute.SELECTIVE,
    edges=(("recompute", Recompute.NONE),),
    beside=False,
    stack="torchtitan-eager",
)
"""accelerate's configuration: FSDP2, and one strategy for all layers."""
DEEPSPEED_FILE = replace(
    DEEPSPEED,
    name="deepspeed-file",
    missing=DEEPSPEED.missing[:1],
    block_uniform=("recompute",),
    block_rule=ACCELERATE.block_rule,
    edges=ACCELERATE.edges,
    stack="deepspeed",
)
"""DeepSpeed's configuration file, for a training script of the user's."""
TARGETS = {"megatron": MEGATRON, "nemo": NEMO, "torchtitan": TORCHTITAN, "deepspeed": DEEPSPEED_FILE,
           "accelerate": ACCELERATE}  # fmt: skip
"""Other software, by the name of ``--for``."""
BACKENDS = {backend.name: backend for backend in (GALVATRON, DEEPSPEED, ANY, *TARGETS.values())}


def target_named(name: str, field: str = "--for") -> Backend:
    """Return other software by name.

    Raises:
        InputError: no software has this name.
    """
    if name not in TARGETS:
        raise unknown(field, name, TARGETS)
    return TARGETS[name]


def in_mode(backend: Backend, mode: Mode) -> Backend:
    """Return a backend for a mode: inference without recomputation and offload, which only backward needs."""
    if mode is Mode.TRAINING:
        return backend
    return replace(backend, values={**backend.values, "recompute": (Recompute.NONE,), "offload": (Offload.NONE,)})


def backend_named(name: str) -> Backend:
    """Return a backend by name.

    Raises:
        InputError: no backend has this name.
    """
    if name not in BACKENDS:
        raise unknown("--backend", name, BACKENDS)
    return BACKENDS[name]


def check_mode(mode: Mode, backend: Backend, field: str = "--mode") -> None:
    """Check that a backend runs plans in a mode.

    Raises:
        InputError: it does not.
    """
    if mode not in backend.modes:
        modes = ", ".join(mode.value for mode in backend.modes)
        raise InputError(field, mode.value, f"Backend {backend.name} is for {modes}.")
