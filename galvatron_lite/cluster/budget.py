"""How much memory a plan may take on each device."""

from __future__ import annotations

from dataclasses import dataclass

from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.errors import InputError
from galvatron_lite.units import format_budget, parse_budget

DEFAULT_BUDGET = "95%"
"""Of each device's memory, where nobody says."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that a plan may take on one device."""

    least: int  # on any device
    # (name of a device, bytes on it) where types of devices have unlike budgets; none is below ``least``
    by_device: tuple[tuple[str, int], ...] = ()

    def of(self, device: str) -> int:
        """Bytes on a device by name; on devices of several types together (no name) the least."""
        return dict(self.by_device).get(device, self.least)

    @property
    def most(self) -> int:
        """Bytes on the devices that may take most."""
        return max((size for _, size in self.by_device), default=self.least)

    def within(self, limit: int) -> Budget:
        """The same, and nowhere more than so many bytes."""
        limits = tuple((name, min(size, limit)) for name, size in self.by_device)
        alike = len({size for _, size in limits}) < 2
        return Budget(min(self.least, limit), () if alike else limits)

    def scaled(self, factor: float) -> Budget:
        """So many times as much on every device, in whole bytes, rounded down, but not to nothing."""
        sizes = tuple((name, max(int(size * factor), 1)) for name, size in self.by_device)
        return Budget(max(int(self.least * factor), 1), sizes)

    def plus(self, size: int) -> Budget:
        """So many bytes more on every device; negative: less."""
        return Budget(self.least + size, tuple((name, bytes_ + size) for name, bytes_ in self.by_device))


def as_budget(budget: int | Budget) -> Budget:
    """A budget that may be given as bytes, the same on every device."""
    return Budget(budget) if isinstance(budget, int) else budget


def bytes_on(budget: int | Budget, device: str) -> int:
    """Bytes that a plan may take on a device by name, of a budget that may be one for all."""
    return as_budget(budget).of(device)


def budget_on(cluster: Cluster, value: str | int, field: str = "--mem") -> Budget:
    """A budget on the devices of a cluster.

    Args:
        cluster: the devices.
        value: bytes on every device, or a text: a size (``40GB``), or a share of each device's own memory (``80%``).

    Raises:
        InputError: a text that cannot be read, or more than a device has.
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
