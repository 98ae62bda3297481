"""What a dry run of a plan saw, and what was made of it. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from galvatron_lite.plans.schema import MemoryBreakdown

NOBODY = -1
"""In place of a rank, a micro-batch or a number of messages: there is none."""


class Kind(StrEnum):
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
    """One collective, or one message from rank to rank, as one rank gave it.

    Attributes:
        number: of this rank's messages, in the order in which they start, from 0.
        kind: what it is.
        ranks: world ranks of its group, in order.
        purpose: what its group is for: the name that the runtime made it with.
        peer: the world rank that a message goes to or comes from, or the root of a collective.
        tag: of a message from rank to rank.
        shape: of what this rank gives; of what it gets, where it only receives.
        dtype: of it (``float32``).
        bytes: that this rank gives: of a reduce-scatter or all-to-all its whole input, of an all-gather its own part;
            of what only arrives, 0.
        phase: of the step.
        microbatch: ``NOBODY``: none.
        layer: whose forward or backward it belongs to; empty: none, or unknown.
        sent, taken: of an all-to-all of uneven parts: items for and from each rank of the group; empty: even ones.
        waited: how many messages this rank had started when it first waited for this one; ``NOBODY``: it did not.
        used: the micro-batch that was worked on when this rank first waited for this one; ``NOBODY``: it did not, or
            there was none.
        operator: of a sum: ``sum``, ``max``, ...; empty elsewhere.
    """

    number: int
    kind: Kind
    ranks: tuple[int, ...]
    purpose: str
    peer: int
    tag: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    phase: During
    microbatch: int = NOBODY
    layer: str = ""
    sent: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    waited: int = NOBODY
    used: int = NOBODY
    operator: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory at one moment of the run.

    Attributes:
        number: of the moment: how many operations had run.
        phase: of the step.
        microbatch: ``NOBODY``: none.
        layer: that ran last; empty: none.
        memory: bytes by category; ``context`` is not seen in a dry run and 0 here.
    """

    number: int
    phase: During
    microbatch: int
    layer: str
    memory: MemoryBreakdown


@dataclass(frozen=True, slots=True)
class ParameterSplit:
    """What a rank has of a parameter.

    Attributes:
        name: in the model.
        whole: its shape in the unsplit model.
        held: shape of this rank's part at rest.
        updated: items that this rank's optimizer updates.
        sharded: whether other ranks hold the rest of what this rank computes with, which is gathered for use (ZeRO).
        on_host: whether the optimizer updates it in host memory.
        used: shape of what this rank computes with: ``held``, or what is gathered of it; empty: not known.
    """

    name: str
    whole: tuple[int, ...]
    held: tuple[int, ...]
    updated: int
    sharded: bool = False
    on_host: bool = False
    used: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """What was really done to a layer on one rank.

    Attributes:
        layer: its name.
        taken: shape of the hidden state it was given in a micro-batch (as it lies on this rank); of its first tensor
            where it is given no floating-point one; empty: it never ran.
        returned: shape of the first tensor that it returned.
        forwards: how often its forward ran in a step, recomputation included.
        parameters: of it.
    """

    layer: str
    taken: tuple[int, ...]
    returned: tuple[int, ...]
    forwards: int
    parameters: tuple[ParameterSplit, ...] = ()


@dataclass(frozen=True, slots=True)
class RoleRun:
    """A whole step of one rank, of which others do exactly what it does.

    Attributes:
        rank: that was run.
        stage: the group of devices that it belongs to; its stage, where each has one.
        role: what is particular about it, in words.
        ranks: all that play this role.
        messages: of setting up and of one step, in order.
        samples: memory over the step, in order; not all moments, but every layer's end and the peak.
        peak: memory at the step's worst moment. ``context`` is the prediction's, where one was given.
        kept: bytes kept behind a layer's forward until its backward, of one micro-batch, by layer.
        splits: what was done to this rank's layers.
        seconds: of processor time that the dry run took.
        host: most bytes held in host memory meanwhile (offload).
        notes: what the run took for granted, or could not see.
    """

    rank: int
    stage: int
    role: str
    ranks: tuple[int, ...]
    messages: tuple[Message, ...]
    samples: tuple[Sample, ...]
    peak: MemoryBreakdown
    kept: dict[str, int] = field(default_factory=dict)
    splits: tuple[LayerSplit, ...] = ()
    seconds: float = 0.0
    host: int = 0
    notes: tuple[str, ...] = ()


class Verdict(StrEnum):
    """Of one check; ``differs``: other than predicted, by no more than the kernels of another device may explain."""

    PASSED = "passed"
    DIFFERS = "differs"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """One question about a plan, answered.

    Attributes:
        name: of the question.
        verdict: the answer.
        said: one line that a person can act on.
        details: more lines.
    """

    name: str
    verdict: Verdict
    said: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verification:
    """All that was checked of a plan.

    Attributes:
        checks: in the order in which they are told.
        roles: what was run for them.
    """

    checks: Sequence[Check]
    roles: Sequence[RoleRun] = ()

    @property
    def passed(self) -> bool:
        """Whether none failed."""
        return all(check.verdict is not Verdict.FAILED for check in self.checks)
