"""What the points of a sweep share, how one point is planned, and which numbers of devices a cluster offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from galvatron_lite.cluster.budget import Budget, budget_on, bytes_on
from galvatron_lite.cluster.cluster import Cluster, DeviceGroup, Level
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.plans.schema import Mode, Plan, Prediction, Schedule
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.best_first import MOST_WORK
from galvatron_lite.search.pins import NOTHING, Pins
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.shapes import Session
from galvatron_lite.search.space import Delay


def device_counts(cluster: Cluster, *, divide_well: bool = False) -> tuple[int, ...]:
    """Numbers of devices that fill whole members of each level: 1 to a node, then whole nodes; ascending.

    ``divide_well``: those alone that are 2^a or 3 * 2^a members of a level, and whole levels.
    """
    counts, unit = [1], 1
    for level in cluster.levels:
        every = range(2, level.size + 1)
        counts += [unit * size for size in every if not divide_well or even(size) or size == level.size]
        unit *= level.size
    return tuple(counts)


def even(number: int) -> bool:
    """Whether a number is 2^a or 3 * 2^a."""
    while number % 2 == 0:
        number //= 2
    return number in (1, 3)


def first_devices(cluster: Cluster, devices: int) -> Cluster:
    """The cluster that the first devices in rank order make."""
    if devices == cluster.devices:
        return cluster
    if not 1 <= devices < cluster.devices:
        raise InputError("--gpus", devices, f"The cluster has {cluster.devices}; give 1 to that many.")
    levels, groups = _levels(cluster.levels, devices), _groups(cluster, devices)
    if len(groups) == 1 and groups[0].levels:
        levels, groups = groups[0].levels, (replace(groups[0], levels=()),)
    return replace(cluster, levels=levels, groups=groups)


def _levels(levels_above: Sequence[Level], devices: int) -> tuple[Level, ...]:
    levels, wanted = list[Level](), devices
    for level in levels_above:
        if wanted <= level.size:
            return (*levels, replace(level, size=wanted))
        if wanted % level.size:
            raise InputError(
                "--gpus", devices, f"A {level.name} has {level.size} members; give a number of whole ones."
            )
        levels.append(level)
        wanted //= level.size
    return tuple(levels)


def _groups(cluster: Cluster, devices: int) -> tuple[DeviceGroup, ...]:
    groups, left = list[DeviceGroup](), devices
    for group in cluster.groups:
        if left > 0:
            levels = _levels(group.levels, devices) if group.levels else ()
            groups.append(replace(group, count=min(left, group.count), levels=levels))
        left -= group.count
    return tuple(groups)


SAMPLES_PER_DEVICE, PICTURES_PER_DEVICE = 8, 32  # a step, where no batch is given

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class PlanSetting:
    """What does not change from point to point."""

    profile: Profile  # of the largest cluster that is asked about
    budget: int | Budget  # bytes a device; of each type of device where they are unlike
    pins: Pins = NOTHING  # what is not left to the search
    # to choose from where there is a pipeline; None: those that the search takes by itself
    schedules: tuple[Schedule, ...] | None = None
    backend: str = "galvatron"  # what is to run the plans
    # the budget as it was asked for, where fewer devices may have another one: a share of their own memory
    memory: str | int | None = None
    # the profile of so many devices, where it is not just that of the first of all: fewer devices may all be of one
    # type, and train in a better precision
    source: Callable[[int], Profile] | None = None
    mode: Mode = Mode.TRAINING  # what the plans are for
    delay: Delay | None = None  # which rules of delayed gradients are allowed; None: none
    margin: float = 0.0  # share of budgets that predictions keep free
    tolerance: float = 0.0  # share of the step time that plans may be from the best
    # what earlier points have priced, by devices
    sessions: dict[int, Session] = field(default_factory=dict, compare=False, repr=False)

    def session(self, devices: int) -> Session:
        """The session of the cluster that the first devices make."""
        if devices not in self.sessions:
            cluster = self.profile.cluster
            if self.source is not None and devices != cluster.devices and not cluster.alike:
                profile = self.source(devices)
            else:
                profile = self.profile.on(first_devices(cluster, devices))
            self.sessions[devices] = Session(profile, self.mode)
        return self.sessions[devices]

    def budget_at(self, devices: int) -> int | Budget:
        """Bytes a device of the first devices."""
        if self.memory is None:
            return self.budget
        return budget_on(self.session(devices).profile.cluster, self.memory)


@dataclass(frozen=True, slots=True)
class Point:
    """The fastest plan for a number of devices, a batch and a budget; or why there is none."""

    devices: int
    batch: int  # samples a step
    budget: int  # bytes a device; the least where types of devices have unlike ones
    plan: Plan | None = None  # the fastest; None where there is none, or where it was not looked for
    reason: str = ""  # why there is no plan; empty where there is one
    needs: int | None = None  # bytes a device that would be enough, where that is known and the reason

    @property
    def prediction(self) -> Prediction | None:
        """Of the plan; None where there is none."""
        return None if self.plan is None else self.plan.prediction

    @property
    def seconds(self) -> float:
        """Of a step; infinite without a plan."""
        return float("inf") if self.prediction is None else self.prediction.step_seconds

    @property
    def rate(self) -> float:
        """Samples a second, 0 without a plan."""
        return self.batch / self.seconds

    @property
    def peak(self) -> int:
        """Bytes on the fullest device, 0 without a plan."""
        return 0 if self.prediction is None else self.prediction.peak_memory


@dataclass(frozen=True, slots=True)
class Points:
    """What a sweep has looked at."""

    points: tuple[Point, ...] = ()  # in the order they were looked at
    complete: bool = True  # False where it was interrupted: what was not looked at may hold better ones


def batch_for(setting: PlanSetting, devices: int, batch: int | None) -> int:
    """Samples a step: those given, else 8 a device, and 32 where a sample is a picture and not a sequence of tokens."""
    if batch is not None:
        return batch
    return (PICTURES_PER_DEVICE if setting.profile.graph.sequence == 1 else SAMPLES_PER_DEVICE) * devices


def ask(
    setting: PlanSetting,
    devices: int,
    batch: int,
    *,
    budget: int | Budget | None = None,
    certify: bool = False,
    runners_up: int = 0,
    progress: Progress | None = None,
    stoppable: bool = False,
    effort: int = MOST_WORK,
    tolerance: float | None = None,
) -> Plan:
    """The fastest plan on the first devices of the setting's cluster; see ``search.planner.find_plan``."""
    session = setting.session(devices)
    plan = find_plan(
        session.profile,
        devices=devices,
        global_batch=batch,
        budget=setting.budget_at(devices) if budget is None else budget,
        fixed=setting.pins.at(devices, batch),
        schedules=setting.schedules,
        backend=setting.backend,
        certify=certify,
        runners_up=runners_up,
        progress=progress,
        session=session,
        stoppable=stoppable,
        effort=effort,
        mode=setting.mode,
        delay=setting.delay,
        tolerance=setting.tolerance if tolerance is None else tolerance,
        margin=setting.margin,
    )
    if plan.provenance is None or not setting.pins.notes:
        return plan
    return replace(plan, provenance=replace(plan.provenance, notes=(*plan.provenance.notes, *setting.pins.notes)))


def look(
    setting: PlanSetting, devices: int, batch: int, budget: int | Budget | None = None, progress: Progress | None = None
) -> Point:
    """A point of a sweep: one without a plan says why."""
    point = Point(devices, batch, bytes_on(setting.budget if budget is None else budget, ""))
    try:
        limit = setting.budget_at(devices) if budget is None else budget
        point = replace(point, budget=bytes_on(limit, ""))
        return replace(point, plan=ask(setting, devices, batch, budget=limit, progress=progress))
    except InfeasibleError as error:
        return replace(point, reason=str(error), needs=error.smallest_budget)
    except InputError as error:
        return replace(point, reason=str(error))


def with_progress(values: Sequence[int], label: str, progress: Progress | None) -> Iterator[int]:
    """The values one by one; what is looked at is told as ``label``, which has the value's place in it."""
    for number, value in enumerate(values):
        if progress is not None:
            progress(number, len(values), label.format(value))
        yield value


def gathered(points: Iterator[Point]) -> Points:
    """The points of a sweep; those so far where it is interrupted (Ctrl-C), once one of them has a plan."""
    done: list[Point] = []
    try:
        for point in points:
            done.append(point)  # one by one: what an interrupt leaves must be there
    except KeyboardInterrupt:
        if all(point.plan is None for point in done):
            raise
        return Points(tuple(done), complete=False)
    return Points(tuple(done))


def require_plan(points: Points) -> None:
    """Raise where no point has a plan."""
    if points.points and all(point.plan is None for point in points.points):
        last = points.points[-1]
        raise InfeasibleError(last.reason, last.needs)
