"""What processes send each other, and one pass with what comes before it and leaves after it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from galvatron_lite.parallelism.cyclic.timeline import StagePass


class MessageContent(StrEnum):
    """What a message holds.

    ``activation``: what a stage made of a micro-batch, for the next stage. ``gradient``: of what a stage was given, for
    the stage before. ``partial``: the sum of a stage's gradients of workers 0..worker. ``update``: that of all workers.
    ``weights``: versions of a stage's parameters. ``states``: the same, the gradient sum of workers 0..worker (none
    after the last one, who made the update) and the optimizer's states.
    """

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    PARTIAL = "partial"
    UPDATE = "update"
    WEIGHTS = "weights"
    STATES = "states"


@dataclass(frozen=True, slots=True)
class CyclicMessage:
    """What one process sends to another."""

    kind: MessageContent  # what it holds
    stage: int  # whose parameters or gradients; of an activation or its gradient, the stage whose pass made it
    step: int  # training step of the pass at which it is sent; of an update, the one whose gradients it holds
    worker: int  # of the pass at which it is sent
    source: int  # process that sends it
    target: int  # process that receives it
    versions: tuple[int, ...] = ()  # of the parameters it holds


@dataclass(frozen=True, slots=True)
class CyclicPass:
    """One forward or backward pass of a stage."""

    moment: StagePass  # which, and in which time step
    version: int  # of the stage's parameters, which forward and backward of a micro-batch use
    receives: tuple[CyclicMessage, ...] = ()  # messages that must be there before it
    sends: tuple[CyclicMessage, ...] = ()  # messages sent once it is done
    # training steps whose updates the process applies to the stage before it (``data``, ``stages``)
    applies: tuple[int, ...] = ()
    finishes: bool = False  # whether it completes the stage's gradient of its training step
