"""Between backward, the optimizer and the next forward, where the optimizer updates something else than the parameters
that the model computes with: copies in host memory (offload), rows of them (ZeRO-1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from galvatron_lite.parallelism.data.apply import GradientReducer
from galvatron_lite.parallelism.offload.states import HostCopy, Lowering
from galvatron_lite.runtime.gradient_guard import guard_gradients
from galvatron_lite.runtime.sharding import Owned


@dataclass(slots=True)
class Updates:
    """Carries gradients to what the optimizer updates, and updated values back; nothing to do for plain parameters.

    Every call is made by all ranks of a stage together.
    """

    owned: Sequence[Owned]  # this rank's parameters
    reducer: GradientReducer  # of their gradients
    guarded: bool = False  # whether gradients refuse that other code takes their norm; see ``gradient_guard``
    due: bool = False  # whether an optimizer may have stepped since updated values were last brought back
    versions: tuple[int, ...] = ()  # of what it updates, when they were last brought back
    lowering: Lowering = field(init=False)  # brings gradients to host memory

    def __post_init__(self) -> None:
        final = [one.host for one in self.owned if one.host is not None and one.is_final]
        self.lowering = Lowering(self.hosts, final, lambda: self.reducer.synchronise)
        self.versions = self._versions()

    @property
    def hosts(self) -> list[HostCopy]:
        """The copies in host memory."""
        return [one.host for one in self.owned if one.host is not None]

    @property
    def is_needed(self) -> bool:
        """Whether the optimizer updates anything else than the parameters themselves."""
        return any(one.updated is not one.parameter for one in self.owned)

    def begin(self) -> None:
        """Before the model is used: its values are up to date, and gradients that were zeroed are gone everywhere."""
        self.publish()
        for host in self.hosts:
            host.follow()

    def deliver(self) -> None:
        """Once gradients are reduced: bring down those that the host needs."""
        self.lowering.finish()
        self.due = self.is_needed
        if self.guarded:
            guard_gradients(self.owned)

    def publish(self) -> None:
        """Once the optimizer has stepped: every rank computes with the updated values."""
        if not self.due and self.versions == self._versions():
            return
        self.due = False
        for host in self.hosts:
            host.lift()
        self.reducer.gather()
        self.versions = self._versions()

    def _versions(self) -> tuple[int, ...]:
        """A training loop may change parameters in place, too (as to clamp them), on all ranks."""
        return tuple(one.updated._version for one in self.owned if one.updated is not one.parameter)

    def take(self) -> None:
        """Values of parameters were set from outside: the host's copies follow."""
        for host in self.hosts:
            host.take()
        self.due = False
