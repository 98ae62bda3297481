"""How few devices will do: to fit a model at all, for a step in so many seconds, or for a throughput."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from galvatron_lite.cluster.budget import bytes_on
from galvatron_lite.errors import InputError
from galvatron_lite.questions.bounds import least_seconds
from galvatron_lite.questions.counts import device_counts
from galvatron_lite.questions.setting import Point, Progress, Setting, batch_for, gathered, look
from galvatron_lite.units import format_seconds


class Goal(StrEnum):
    """What must be reached."""

    FIT = "fit"
    STEP = "step"
    SAMPLES = "samples"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Target:
    """What the devices must reach.

    Attributes:
        goal: of which kind.
        value: seconds a step at most, or samples or tokens a second at least; not used by ``fit``.
    """

    goal: Goal
    value: float = 0.0

    def seconds(self, batch: int, sequence: int) -> float:
        """Seconds of a step that are few enough."""
        if self.goal is Goal.FIT:
            return float("inf")
        work = {Goal.SAMPLES: batch, Goal.TOKENS: batch * sequence}
        return work[self.goal] / self.value if self.goal in work else self.value


@dataclass(frozen=True, slots=True)
class Fewest:
    """The answer.

    Attributes:
        target: what must be reached.
        points: of the numbers of devices up to the answer, ascending; those that cannot reach it by their compute alone
            have no plan, and say so.
        answer: of the fewest devices; None where no number that was looked at is enough.
        complete: whether every number up to the answer was looked at.
    """

    target: Target
    points: tuple[Point, ...]
    answer: Point | None
    complete: bool


def fewest_devices(
    setting: Setting, target: Target, batch: int | None = None, progress: Progress | None = None
) -> Fewest:
    """The fewest devices of the setting's cluster that reach a target: 1 to a node, then whole nodes.

    More devices are not always faster (a batch divides badly among 7), so that every number up to the answer is looked
    at, but for those whose compute alone, shared without loss, takes longer than the target.

    Args:
        setting: its profile has the largest number of devices.
        target: what must be reached.
        batch: samples a step; 8 a device if not given.
        progress: called with (numbers done, numbers in all, what is being looked at).

    Raises:
        InputError: a target that is not above 0, or of a step without a batch.
    """
    if target.goal is not Goal.FIT and not 0 < target.value < float("inf"):
        raise InputError(target.goal.value, target.value, "Give a number above 0.")
    if target.goal is Goal.STEP and batch is None:
        raise InputError("--batch", None, "The seconds of a step depend on the samples in it: say how many.")
    seen = gathered(_looked_at(setting, target, batch, progress))
    last = seen.points[-1] if seen.points else None
    reached = last is not None and last.plan is not None and _met(setting, target, last)
    return Fewest(target, seen.points, last if reached else None, seen.complete)


def _looked_at(setting: Setting, target: Target, batch: int | None, progress: Progress | None) -> Iterator[Point]:
    counts = device_counts(setting.profile.cluster)
    for number, devices in enumerate(counts):
        if progress is not None:
            progress(number, len(counts), f"{devices} GPUs")
        samples = batch_for(devices, batch)
        point = _bounded(setting, target, devices, samples) or look(setting, devices, samples)
        yield point
        if point.plan is not None and _met(setting, target, point):
            return


def _bounded(setting: Setting, target: Target, devices: int, batch: int) -> Point | None:
    """A point without a plan where compute alone takes too long; None where it may be enough."""
    least = least_seconds(setting.profile, devices, batch)
    if least <= target.seconds(batch, setting.profile.graph.sequence):
        return None
    budget = bytes_on(setting.budget, "")
    return Point(devices, batch, budget, reason=f"too few: compute alone takes {format_seconds(least)} a step")


def _met(setting: Setting, target: Target, point: Point) -> bool:
    return point.seconds <= target.seconds(point.batch, setting.profile.graph.sequence)
