"""The checks of a plan, what a dry run observed, and their verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from galvatron_lite.errors import InputError
from galvatron_lite.plans.schema import MemoryBreakdown, Mode, Plan, TrainedBy

NOBODY = -1  # in place of a rank, a micro-batch or a number of messages: there is none


class MessageType(StrEnum):
    """What a message is, as seen by one rank."""

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
    """What a rank does meanwhile, in the order of a step."""

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
    """One collective, or one message from rank to rank, as one rank gave it."""

    number: int  # of this rank's messages, in the order in which they start, from 0
    kind: MessageType  # what it is
    ranks: tuple[int, ...]  # world ranks of its group, in order
    purpose: str  # what its group is for: the name that the runtime made it with
    peer: int  # the world rank that a message goes to or comes from, or the root of a collective
    tag: int  # of a message from rank to rank
    shape: tuple[int, ...]  # of what this rank gives; of what it gets, where it only receives
    dtype: str  # of it (``float32``)
    # that this rank gives: of a reduce-scatter or all-to-all its whole input, of an all-gather its own part; of what
    # only arrives, 0
    bytes: int
    phase: During  # of the step
    microbatch: int = NOBODY  # ``NOBODY``: none
    layer: str = ""  # whose forward or backward it belongs to; empty: none, or unknown
    # sent, taken: of an all-to-all of uneven parts: items for and from each rank of the group; empty: even ones
    sent: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    # how many messages this rank had started when it first waited for this one; ``NOBODY``: it did not
    waited: int = NOBODY
    # the micro-batch that was worked on when this rank first waited for this one; ``NOBODY``: it did not, or there
    # was none
    used: int = NOBODY
    operator: str = ""  # of a sum: ``sum``, ``max``, ...; empty elsewhere
    times: int = 1  # in a step: more than one where it stands for those of micro-batches that were not run


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory at one moment of the run."""

    number: int  # of the moment: how many operations had run
    phase: During  # of the step
    microbatch: int  # ``NOBODY``: none
    layer: str  # that ran last; empty: none
    memory: MemoryBreakdown  # bytes by category; ``context`` is not seen in a dry run and 0 here


@dataclass(frozen=True, slots=True)
class ParameterSplit:
    """What a rank has of a parameter."""

    name: str  # in the model
    whole: tuple[int, ...]  # its shape in the unsplit model
    held: tuple[int, ...]  # shape of this rank's part at rest
    updated: int  # items that this rank's optimizer updates
    # whether other ranks hold the rest of what this rank computes with, which is gathered for use (ZeRO)
    sharded: bool = False
    on_host: bool = False  # whether the optimizer updates it in host memory
    # shape of what this rank computes with: ``held``, or what is gathered of it; empty: not known
    used: tuple[int, ...] = ()
    trains: bool = True  # whether the loss depends on it


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """What was really done to a layer on one rank."""

    layer: str  # its name
    # shape of the hidden state it was given in a micro-batch (as it lies on this rank); of its first tensor where it
    # is given no floating-point one; empty: it never ran
    taken: tuple[int, ...]
    returned: tuple[int, ...]  # shape of the first tensor that it returned
    forwards: int  # how often its forward ran in a step, recomputation included
    parameters: tuple[ParameterSplit, ...] = ()  # of it


@dataclass(frozen=True, slots=True)
class RoleRun:
    """A whole step of one rank, of which others do exactly what it does."""

    rank: int  # that was run
    stage: int  # the group of devices that it belongs to; its stage, where each has one
    role: str  # what is particular about it, in words
    ranks: tuple[int, ...]  # all that play this role
    messages: tuple[Message, ...]  # of setting up and of one step, in order; see ``Message.times``
    samples: tuple[Sample, ...]  # memory over the step, in order; not all moments, but every layer's end and the peak
    peak: MemoryBreakdown  # memory at the step's worst moment. ``context`` is the prediction's, where one was given
    # bytes kept behind a layer's forward until its backward, of one micro-batch, by layer
    kept: dict[str, int] = field(default_factory=dict)
    splits: tuple[LayerSplit, ...] = ()  # what was done to this rank's layers
    seconds: float = 0.0  # of processor time that the dry run took
    host: int = 0  # most bytes held in host memory meanwhile (offload)
    notes: tuple[str, ...] = ()  # what the run took for granted, or could not see


class Verdict(StrEnum):
    """Of one check; ``differs``: other than predicted, by no more than the kernels of another device may explain."""

    PASSED = "passed"
    DIFFERS = "differs"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """One question about a plan, answered."""

    name: str  # of the question
    verdict: Verdict  # the answer
    said: str  # one line that a person can act on
    details: tuple[str, ...] = ()  # more lines


@dataclass(frozen=True, slots=True)
class Verification:
    """All that was checked of a plan."""

    checks: Sequence[Check]  # in the order in which they are told
    roles: Sequence[RoleRun] = ()  # what was run for them

    @property
    def passed(self) -> bool:
        """Whether none failed."""
        return all(check.verdict is not Verdict.FAILED for check in self.checks)


class Checks(StrEnum):
    """Kinds of checks."""

    DRY = "dry"
    NUMBERS = "numbers"


def checks_named(names: str | Sequence[str]) -> tuple[Checks, ...]:
    """Checks by their names; in one text with commas between."""
    words = names.split(",") if isinstance(names, str) else names
    names_known = [one.value for one in Checks]
    for word in words:
        if word not in names_known:
            raise InputError("--checks", word, f"Give one or several of {', '.join(names_known)}, with commas between.")
    return tuple(one for one in Checks if one.value in words)


def not_run(plan: Plan) -> str:
    """Why no rank of a plan is run here; empty where they are."""
    if plan.cyclic is not None:
        return "Gradients are delayed under the plan: it is not meant to train like one process."
    if plan.backend is not TrainedBy.GALVATRON:
        return f"{plan.backend.value} trains under the plan, and is not run here."
    return "" if plan.mode is Mode.TRAINING else "The plan is for inference: there is no training step."
