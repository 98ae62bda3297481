"""What ``scripts/cyclic_study`` found."""

from __future__ import annotations

from dataclasses import dataclass

from cyclic_study_memory import Memory
from cyclic_study_messages import Messages
from cyclic_study_train import Run


@dataclass(frozen=True, slots=True)
class Study:
    """Everything that was measured.

    Attributes:
        date: day.
        machine: where.
        command: that made it.
        runs: trainings.
        memory: by task.
        messages: by task.
    """

    date: str
    machine: dict[str, str]
    command: str
    runs: list[Run]
    memory: list[Memory]
    messages: list[Messages]
