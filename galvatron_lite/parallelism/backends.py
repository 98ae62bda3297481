"""What can run a plan: the strategies and schedules that a backend trains with. No torch here."""

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
    """What trains by a plan."""

    GALVATRON = "galvatron"
    DEEPSPEED = "deepspeed"


@dataclass(frozen=True, slots=True)
class Backend:
    """What a way to train supports."""

    name: str  # as given to ``--backend``
    pipeline: Callable[[Schedule], bool]  # which pipeline schedules it runs
    # what fields of ``Strategy`` may be; a field that is absent may have any value
    values: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()  # what it leaves out, a line each, told with every plan
    rule: Callable[[Strategy], bool] | None = None  # what it asks of fields together; None: nothing
    pipelines: tuple[Mode, ...] = tuple(Mode)  # the modes in which it runs several stages
    modes: tuple[Mode, ...] = tuple(Mode)  # what it runs plans for
    pictures: bool = True  # whether it trains networks whose blocks work on pictures
    # fields of ``Strategy`` that have one value in all layers that have parameters; the search takes each value in
    # turn (``search.families.family``)
    uniform: tuple[str, ...] = ()
    block_uniform: tuple[str, ...] = ()  # fields that have one value in all blocks besides
    block_rule: Callable[[Strategy], bool] | None = None  # what it asks of blocks alone; None: nothing
    # fields of the layers around the blocks and their values; None: the blocks' own
    edges: tuple[tuple[str, object], ...] = ()
    # ``uniform`` fields and the values they may have under a pipeline, and without one; others may have any
    piped: tuple[tuple[str, tuple[object, ...]], ...] = ()
    alone: tuple[tuple[str, tuple[object, ...]], ...] = ()
    # whether every stage of a pipeline has as many blocks as any other, or the ends one fewer
    even: bool = False
    stack: str = ""  # the software whose costs plans for it are estimated with; empty: our own runtime's
    # whether it runs plans other than stages in the model's order: branches on devices of their own, and delayed
    # gradients
    beside: bool = True
    # fields of ``Strategy``, and the value that each must have under a schedule that splits backward
    split_backward: tuple[tuple[str, object], ...] = ()
    # by field of ``Strategy``: the value that the search keeps to while something fits
    reserved: Mapping[str, object] = field(default_factory=dict)

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """The pipeline schedules it runs."""
        return tuple(filter(self.pipeline, schedules()))

    def required(self, schedule: Schedule) -> tuple[tuple[str, object], ...]:
        """Fields of ``Strategy``, and the value that each must have in a pipeline under a schedule."""
        return self.split_backward if schedule.splits_backward else ()

    def leaves_out(self, mode: Mode) -> tuple[str, ...]:
        """What is missing in a mode, a line each."""
        if mode in self.pipelines:
            return self.missing
        return (*self.missing, f"{self.name} runs no pipelines in {mode.value} (--backend {ANY.name} prices them)")

    @property
    def limits(self) -> Mapping[str, tuple[object, ...]]:
        """``values``, and of dimensions that are none of the fields of ``Strategy``."""
        if self.name in (GALVATRON.name, ANY.name) or not added_dimensions():
            return self.values
        return {
            **{
                added_dimension.name: (1,)
                for added_dimension in added_dimensions()
                if self.name not in added_dimension.software
            },
            **self.values,
        }

    def runs(self, strategy: Strategy) -> bool:
        """Whether it trains with a strategy."""
        return all(getattr(strategy, name) in values for name, values in self.limits.items()) and self.says(strategy)

    def says(self, strategy: Strategy) -> bool:
        """Whether the fields of a strategy, each of which it runs, go together."""
        return self.rule is None or self.rule(strategy)


def _trains(strategy: Strategy) -> bool:
    """Whether our own runtime trains with what a strategy asks for together.

    One of matmuls, pixels, filters and channels is shared. Where activations go to host memory there is no selective
    recomputation: its own store of what it keeps is out of reach. Experts are spread beside the first alone: sliced
    by the whole tensor group, or whole where that group shares the tokens; not where ZeRO gathers them among
    activations that go to the host.
    """
    if strategy.offloads_activations and strategy.recompute is Recompute.SELECTIVE:
        return False
    inside = [strategy.tensor, strategy.spatial, strategy.filters, strategy.channels]
    if strategy.expert == 1:
        return inside.count(1) >= 3
    if strategy.offloads_activations and strategy.zero_stage > 1:
        return False
    ways = strategy.expert * strategy.tensor if strategy.expert_tensor == 0 else strategy.expert
    sliced_experts = strategy.expert_tensor == 1 and strategy.tensor > 1 and strategy.sequence_parallel
    return inside[1:] == [1, 1, 1] and strategy.devices % ways == 0 and (strategy.expert_tensor == 0 or sliced_experts)


SPLIT_BACKWARD: tuple[tuple[str, object], ...] = (
    ("zero", 1), ("offload", Offload.NONE), ("depth", 1), ("height", 1), ("width", 1), ("filters", 1), ("channels", 1),
)  # fmt: skip
"""What split backward asks of strategies: ZeRO reduces gradients, and offload takes them, when backward ends, before
those of weights are made; products with shares of pixels and channels make them in backward."""
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
"""Everything that is priced: plans for other software, or to see what one would gain."""
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
    """All replicas share optimizer states (the distributed optimizer), and nothing else."""
    return strategy.data == 1 and strategy.zero_stage == (strategy.zero * strategy.context > 1)


def _fully_sharded(strategy: Strategy) -> bool:
    """FSDP2 shares states wherever there are replicas; experts are whole, and spread over the ranks of one replica."""
    spread = strategy.expert == 1 or (
        (strategy.tensor == 1 or strategy.expert_tensor == 1)
        and strategy.zero * strategy.context * strategy.tensor % strategy.expert == 0
    )
    return (strategy.zero_stage > 0) == (strategy.zero * strategy.context > 1) and spread


def _sequence_parallel(strategy: Strategy) -> bool:
    """Tensor groups of blocks share tokens between matmuls, too."""
    return strategy.sequence_parallel == (strategy.tensor > 1)


_TRANSFORMERS_ALONE: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("depth", "height", "width", "filters", "channels"), (1,)),
    "offload": (Offload.NONE,),
}
"""What tools for language models do not have."""
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
"""What Megatron-LM can be told: the distributed optimizer, and one strategy for all layers."""
NEMO = replace(MEGATRON, name="nemo", stack="megatron-bridge")
"""The same for NeMo's recipes, which train with Megatron-Bridge."""
TORCHTITAN = Backend(
    "torchtitan",
    lambda schedule: "torchtitan" in schedule.software,
    {**_TRANSFORMERS_ALONE, "ulysses": (False,)},
    rule=_fully_sharded,
    modes=(Mode.TRAINING,),
    uniform=("data", "tensor", "context", "zero_stage"),
    # torch.distributed.pipelining gathers parameters and reduces gradients once a step, which is what ZeRO-1 moves and
    # holds (backward_maybe_with_nosync)
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
"""What torchtitan's command line can be told: FSDP2, and one strategy for all layers."""
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
"""What accelerate's configuration can be told: FSDP2, and one strategy for all layers."""
DEEPSPEED_FILE = replace(
    DEEPSPEED,
    name="deepspeed-file",
    missing=DEEPSPEED.missing[:1],
    block_uniform=("recompute",),
    block_rule=ACCELERATE.block_rule,
    edges=ACCELERATE.edges,
    stack="deepspeed",
)
"""What DeepSpeed's configuration file can be told, for a training script of the user's own."""
TARGETS = {"megatron": MEGATRON, "nemo": NEMO, "torchtitan": TORCHTITAN, "deepspeed": DEEPSPEED_FILE,
           "accelerate": ACCELERATE}  # fmt: skip
"""Other software that plans are made for, by the name of ``--for``."""
BACKENDS = {backend.name: backend for backend in (GALVATRON, DEEPSPEED, ANY, *TARGETS.values())}


def target_named(name: str, field: str = "--for") -> Backend:
    """What other software can be told.

    Raises:
        InputError: no such software.
    """
    if name not in TARGETS:
        raise unknown(field, name, TARGETS)
    return TARGETS[name]


def in_mode(backend: Backend, mode: Mode) -> Backend:
    """A backend with what it has no use for in a mode left out: nothing is computed again, or waits for a backward."""
    if mode is Mode.TRAINING:
        return backend
    return replace(backend, values={**backend.values, "recompute": (Recompute.NONE,), "offload": (Offload.NONE,)})


def backend_named(name: str) -> Backend:
    """The backend of a name.

    Raises:
        InputError: there is none.
    """
    if name not in BACKENDS:
        raise unknown("--backend", name, BACKENDS)
    return BACKENDS[name]


def check_mode(mode: Mode, backend: Backend, field: str = "--mode") -> None:
    """Raise where a backend runs nothing in a mode.

    Raises:
        InputError: see above.
    """
    if mode not in backend.modes:
        modes = ", ".join(mode.value for mode in backend.modes)
        raise InputError(field, mode.value, f"Backend {backend.name} is for {modes}.")
