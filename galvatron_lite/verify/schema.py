"""Records of dry runs, and the checks of a plan with their verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from galvatron_lite.errors import InputError
from galvatron_lite.plans.schema import MemoryBreakdown, Mode, Plan, TrainedBy

NOBODY = -1  # no rank, no micro-batch, or no message


class MessageType(StrEnum):
    """Kind of a message, as one rank sees it."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    SEND = "send"
    RECEIVE = "receive"
    BARRIER = "barrier"


class During(StrEnum):
    """Phase of a step, in order."""

    SETUP = "setup"
    BETWEEN = "between"
    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    CHECK = "check"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Message:
    """A collective, or a message between two ranks, as recorded on one rank."""

    number: int  # of this rank's messages, in the order in which they start, from 0
    kind: MessageType
    ranks: tuple[int, ...]  # world ranks of its group, in order
    purpose: str  # of its group: the description that the runtime gave it
    peer: int  # world rank of the partner of a message between two ranks, or of the root of a collective
    tag: int  # of a message between two ranks
    shape: tuple[int, ...]  # of this rank's input; of its output if it only receives
    dtype: str  # ``float32``, ...
    # of this rank's input: all of it for a reduce-scatter or all-to-all, this rank's shard for an all-gather; 0 if it
    # only receives
    bytes: int
    phase: During
    microbatch: int = NOBODY
    layer: str = ""  # whose forward or backward pass it belongs to; empty: none, or unknown
    sent: tuple[int, ...] = ()  # by an uneven all-to-all: items to each rank of the group; empty: even
    taken: tuple[int, ...] = ()  # by an uneven all-to-all: items from each rank of the group; empty: even
    waited: int = NOBODY  # messages that this rank had started when it first waited for this one; ``NOBODY``: never
    used: int = NOBODY  # micro-batch that ran when this rank first waited for this one; ``NOBODY``: none, or never
    operator: str = ""  # of a reduction: ``sum``, ``max``, ...
    times: int = 1  # in a step; more than 1 if it stands for messages of micro-batches that were not run


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory at one moment of a dry run."""

    number: int  # operations that had run
    phase: During
    microbatch: int
    layer: str  # that ran last; empty: none
    memory: MemoryBreakdown  # bytes by category; ``context`` is 0, as a dry run has no driver


@dataclass(frozen=True, slots=True)
class ParameterSplit:
    """A parameter on one rank."""

    name: str  # in the model
    whole: tuple[int, ...]  # shape in the model
    held: tuple[int, ...]  # shape of what this rank stores between steps
    updated: int  # items that this rank's optimizer updates
    sharded: bool = False  # whether it is gathered from other ranks before use (ZeRO)
    on_host: bool = False  # whether the optimizer updates it in host memory
    used: tuple[int, ...] = ()  # shape of what this rank computes with, gathered if ``sharded``; empty: unknown
    trains: bool = True  # whether the loss depends on it


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """A layer on one rank."""

    layer: str  # name
    # shape on this rank of its first floating-point input in a micro-batch, or else of its first tensor; empty: it
    # never ran
    taken: tuple[int, ...]
    returned: tuple[int, ...]  # shape of the first tensor that it returned
    forwards: int  # forward passes in a step, recomputation included
    parameters: tuple[ParameterSplit, ...] = ()


@dataclass(frozen=True, slots=True)
class RoleRun:
    """A step of one rank, which stands for all ranks of its role."""

    rank: int  # that was run
    stage: int  # the group of devices that it belongs to; its stage, if each group has one
    role: str  # distinguishes it from the other roles of the stage
    ranks: tuple[int, ...]  # of the role
    messages: tuple[Message, ...]  # of setup and of one step, in order; see ``Message.times``
    samples: tuple[Sample, ...]  # memory over the step, in order: at the end of every layer, and at the peak
    peak: MemoryBreakdown  # memory when it is largest; ``context`` is the prediction's, if there is one
    kept: dict[str, int] = field(default_factory=dict)  # bytes that a layer keeps for backward, of one micro-batch
    splits: tuple[LayerSplit, ...] = ()  # this rank's layers
    seconds: float = 0.0  # of processor time that the dry run took
    host: int = 0  # most bytes in host memory (offload)
    notes: tuple[str, ...] = ()  # assumptions of the run, and what it could not see


class Verdict(StrEnum):
    """Result of a check; ``differs``: not as predicted, by no more than another device's kernels may cause."""

    PASSED = "passed"
    DIFFERS = "differs"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """A check of a plan, with its verdict."""

    name: str
    verdict: Verdict
    said: str  # one line that a person can act on
    details: tuple[str, ...] = ()  # more lines


@dataclass(frozen=True, slots=True)
class Verification:
    """All checks of a plan."""

    checks: Sequence[Check]  # in the order of output
    roles: Sequence[RoleRun] = ()  # dry runs that they are based on

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.verdict is not Verdict.FAILED for check in self.checks)


class Checks(StrEnum):
    """Kinds of checks."""

    DRY = "dry"
    NUMBERS = "numbers"


def checks_named(names: str | Sequence[str]) -> tuple[Checks, ...]:
    """Return the kinds of checks with these names, which may be one text with commas between.

    Raises:
        InputError: there is no such kind.
    """
    words = names.split(",") if isinstance(names, str) else names
    choices = [kind.value for kind in Checks]
    for word in words:
        if word not in choices:
            raise InputError("--checks", word, f"Give one or several of {', '.join(choices)}, with commas between.")
    return tuple(kind for kind in Checks if kind.value in words)


def not_run(plan: Plan) -> str:
    """Return why ``galvatron verify`` runs no rank of a plan; empty if it runs them."""
    if plan.cyclic is not None:
        return "Gradients are delayed under the plan: it is not meant to train like one process."
    if plan.backend is not TrainedBy.GALVATRON:
        return f"{plan.backend.value} trains under the plan, and is not run here."
    return "" if plan.mode is Mode.TRAINING else "The plan is for inference: there is no training step."
