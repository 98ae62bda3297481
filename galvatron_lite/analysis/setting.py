"""What all searches of a sweep share, how one point is searched, and which device counts a cluster offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from galvatron_lite.cluster.budget import Budget, budget_on, bytes_on
from galvatron_lite.cluster.cluster import Cluster, DeviceGroup, Level
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.plans.schema import Mode, Plan, Prediction, Schedule
from galvatron_lite.profiler.schema import PlanNeeds, Profile
from galvatron_lite.search.best_first import MOST_WORK
from galvatron_lite.search.pins import NOTHING, Pins
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.shapes import Session
from galvatron_lite.search.space import Delay

SAMPLES_PER_DEVICE, IMAGES_PER_DEVICE = 8, 32  # of a step, by default

Progress = Callable[[int, int, str], None]


def device_counts(cluster: Cluster, *, divide_well: bool = False) -> tuple[int, ...]:
    """Return device counts that fill whole members of each level, ascending: 1 to a node, then whole nodes.

    ``divide_well``: only counts of 2^a or 3 * 2^a members of a level, and whole levels.
    """
    counts, unit = [1], 1
    for level in cluster.levels:
        sizes = range(2, level.size + 1)
        counts += [unit * size for size in sizes if not divide_well or is_even(size) or size == level.size]
        unit *= level.size
    return tuple(counts)


def is_even(number: int) -> bool:
    """Whether a number is 2^a or 3 * 2^a."""
    while number % 2 == 0:
        number //= 2
    return number in (1, 3)


def first_devices(cluster: Cluster, devices: int) -> Cluster:
    """Return the cluster of the first devices in rank order.

    Raises:
        InputError: there are not so many devices, or they do not fill whole nodes.
    """
    if devices == cluster.devices:
        return cluster
    if not 1 <= devices < cluster.devices:
        raise InputError("--gpus", devices, f"The cluster has {cluster.devices}; give 1 to that many.")
    levels, groups, left = _first_levels(cluster.levels, devices), list[DeviceGroup](), devices
    for group in cluster.groups:
        if left > 0:
            group_levels = _first_levels(group.levels, devices) if group.levels else ()
            groups.append(replace(group, count=min(left, group.count), levels=group_levels))
        left -= group.count
    if len(groups) == 1 and groups[0].levels:
        levels, groups = groups[0].levels, [replace(groups[0], levels=())]
    return replace(cluster, levels=levels, groups=tuple(groups))


def _first_levels(levels: Sequence[Level], devices: int) -> tuple[Level, ...]:
    kept, members = list[Level](), devices
    for level in levels:
        if members <= level.size:
            return (*kept, replace(level, size=members))
        if members % level.size:
            remedy = f"A {level.name} has {level.size} members; give a number of whole ones."
            raise InputError("--gpus", devices, remedy)
        kept.append(level)
        members //= level.size
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class PlanSetting:
    """What all searches of a sweep share."""

    profile: Profile  # of the largest cluster
    budget: int | Budget  # bytes a device; by type of device if they differ
    pins: Pins = NOTHING  # choices that are not left to the search
    needs: PlanNeeds = field(default_factory=PlanNeeds)  # what of the pins the model needs
    user_pins: Pins = NOTHING  # the others; those that the user wrote
    pin_words: str = ""  # as the user wrote them
    schedules: tuple[Schedule, ...] | None = None  # to choose from in a pipeline; None: the search's default
    backend: str = "galvatron"  # what runs the plans
    # the budget as the user wrote it; a share of the devices' memory is another number of bytes on fewer devices
    memory: str | int | None = None
    # gives the profile of a number of devices; needed if fewer devices are of one type and train in another precision
    source: Callable[[int], Profile] | None = None
    mode: Mode = Mode.TRAINING
    delay: Delay | None = None  # allowed rules of delayed gradients; None: none
    margin: float = 0.0  # share of the budget that predictions keep free
    tolerance: float = 0.0  # share of the step time by which plans may be slower than the best
    sessions: dict[int, Session] = field(default_factory=dict, compare=False, repr=False)  # prices, by device count

    def session(self, devices: int) -> Session:
        """The session of the first ``devices`` devices of the cluster."""
        if devices not in self.sessions:
            cluster = self.profile.cluster
            if self.source is not None and devices != cluster.devices and not cluster.alike:
                profile = self.source(devices)
            else:
                profile = self.profile.on(first_devices(cluster, devices))
            self.sessions[devices] = Session(profile, self.mode)
        return self.sessions[devices]

    def budget_at(self, devices: int) -> int | Budget:
        """The budget on the first ``devices`` devices, in bytes a device."""
        if self.memory is None:
            return self.budget
        return budget_on(self.session(devices).profile.cluster, self.memory)


@dataclass(frozen=True, slots=True)
class Point:
    """The fastest plan for a device count, a batch and a budget, or the reason why there is none."""

    devices: int
    batch: int  # samples a step
    budget: int  # bytes a device; the least if types of devices have different budgets
    plan: Plan | None = None  # None if there is none, or if it was not searched for
    reason: str = ""  # why there is no plan
    needs: int | None = None  # bytes a device that would be enough, if known

    @property
    def prediction(self) -> Prediction | None:
        """The plan's prediction; None without a plan."""
        return None if self.plan is None else self.plan.prediction

    @property
    def seconds(self) -> float:
        """Seconds of a step; infinite without a plan."""
        return float("inf") if self.prediction is None else self.prediction.step_seconds

    @property
    def rate(self) -> float:
        """Samples a second; 0 without a plan."""
        return self.batch / self.seconds

    @property
    def peak(self) -> int:
        """Bytes on the fullest device; 0 without a plan."""
        return 0 if self.prediction is None else self.prediction.peak_memory


@dataclass(frozen=True, slots=True)
class Points:
    """The points of a sweep, in the order of their searches."""

    points: tuple[Point, ...] = ()
    complete: bool = True  # False if the sweep was interrupted: the points that are missing may be better

    def require_plan(self) -> None:
        """Raise ``InfeasibleError`` if no point has a plan."""
        if self.points and all(point.plan is None for point in self.points):
            raise InfeasibleError(self.points[-1].reason, self.points[-1].needs)


def batch_for(setting: PlanSetting, devices: int, batch: int | None) -> int:
    """The batch, or by default 8 samples a device; 32 if a sample is an image and not a sequence of tokens."""
    if batch is not None:
        return batch
    return (IMAGES_PER_DEVICE if setting.profile.graph.sequence == 1 else SAMPLES_PER_DEVICE) * devices


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
    """Search the fastest plan on the first devices of the setting's cluster; see ``search.planner.find_plan``.

    Errors about pins that the model needs speak of its needs.
    """
    session = setting.session(devices)

    def find(pins: Pins) -> Plan:
        return find_plan(
            session.profile,
            devices=devices,
            global_batch=batch,
            budget=setting.budget_at(devices) if budget is None else budget,
            fixed=pins.at(devices, batch),
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

    try:
        plan = find(setting.pins)
    except InputError as error:
        if not setting.needs.restrict or not error.field.startswith(("--fix", "--forbid")):
            raise
        if setting.pin_words:
            find(setting.user_pins)  # which raises what is wrong with these alone
        raise setting.needs.without_plan(devices, setting.pin_words) from error
    notes = *setting.needs.notes, *(plan.provenance.notes if plan.provenance else ()), *setting.pins.notes
    return plan if plan.provenance is None else replace(plan, provenance=replace(plan.provenance, notes=notes))


def search_point(
    setting: PlanSetting, devices: int, batch: int, budget: int | Budget | None = None, progress: Progress | None = None
) -> Point:
    """Search one point of a sweep; without a plan it has the reason."""
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
    """Yield the values, and report each as the ``label``, formatted with the value."""
    for number, value in enumerate(values):
        if progress is not None:
            progress(number, len(values), label.format(value))
        yield value


def collect(points: Iterator[Point]) -> Points:
    """Collect the points of a sweep until its end or Ctrl-C; an interrupt before any plan is raised again."""
    done: list[Point] = []
    try:
        for point in points:
            done.append(point)  # one at a time, so that an interrupt keeps them
    except KeyboardInterrupt:
        if all(point.plan is None for point in done):
            raise
        return Points(tuple(done), complete=False)
    return Points(tuple(done))
