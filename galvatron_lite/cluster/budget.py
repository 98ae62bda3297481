"""The memory budget: bytes that a plan may take on each device."""

from __future__ import annotations

from dataclasses import dataclass

from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.errors import InputError
from galvatron_lite.units import format_budget, parse_budget

DEFAULT_BUDGET = "95%"
"""Share of each device's memory if no budget is given."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that a plan may take on one device."""

    least: int  # the smallest budget of any device
    # (name of a device, its budget) if types of devices have unlike budgets; no budget is below ``least``
    by_device: tuple[tuple[str, int], ...] = ()

    def of(self, device: str) -> int:
        """Return the budget of a device by name; ``least`` for an empty name (devices of several types)."""
        return dict(self.by_device).get(device, self.least)

    @property
    def most(self) -> int:
        """The largest budget of any device."""
        return max((size for _, size in self.by_device), default=self.least)

    def within(self, limit: int) -> Budget:
        """Return the budget with no device above ``limit`` bytes."""
        limits = tuple((name, min(size, limit)) for name, size in self.by_device)
        alike = len({size for _, size in limits}) < 2
        return Budget(min(self.least, limit), () if alike else limits)

    def scaled(self, factor: float) -> Budget:
        """Multiply the budget of every device; rounds down to whole bytes, but not below 1."""
        sizes = tuple((name, max(int(size * factor), 1)) for name, size in self.by_device)
        return Budget(max(int(self.least * factor), 1), sizes)

    def plus(self, size: int) -> Budget:
        """Add ``size`` bytes to the budget of every device."""
        return Budget(self.least + size, tuple((name, bytes_ + size) for name, bytes_ in self.by_device))


def as_budget(budget: int | Budget) -> Budget:
    """Return a ``Budget`` from bytes that hold for every device, or from a ``Budget``."""
    return Budget(budget) if isinstance(budget, int) else budget


def bytes_on(budget: int | Budget, device: str) -> int:
    """Return the bytes that a plan may take on a device by name; see ``Budget.of``."""
    return as_budget(budget).of(device)


def budget_on(cluster: Cluster, value: str | int, field: str = "--mem") -> Budget:
    """Return the budget on the devices of a cluster.

    Args:
        cluster: the devices.
        value: bytes on every device, or a text: a size (``40GB``), or a share of each device's memory (``80%``).

    Raises:
        InputError: a text that cannot be read, or a budget above a device's memory.
    """
    limits: dict[str, int] = {}
    for device in (group.device for group in cluster.groups):
        size = value if isinstance(value, int) else parse_budget(value, device.memory, field)
        if size > device.memory:
            share = "" if cluster.alike else f" {field} 90% is of each type's own memory."
            has = f"{device.name} has {format_budget(device.memory)} ({device.memory} bytes)."
            raise InputError(field, value, f"{has}{share}")
        limits[device.name] = size
    least = min(limits.values())
    return Budget(least, () if least == max(limits.values()) else tuple(limits.items()))
