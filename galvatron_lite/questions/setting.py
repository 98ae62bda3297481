"""What the points of a question share, and how one of them is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from galvatron_lite.cluster.budget import Budget, budget_on, bytes_on
from galvatron_lite.errors import InfeasibleError, InputError
from galvatron_lite.plans.schema import Mode, Plan, Prediction, Schedule
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.questions.counts import first_devices
from galvatron_lite.questions.pins import NOTHING, Pins
from galvatron_lite.search.best_first import MOST_WORK
from galvatron_lite.search.planner import find_plan
from galvatron_lite.search.session import Session
from galvatron_lite.search.ways import Delay

SAMPLES_PER_DEVICE = 8
"""Samples a step and device where no batch is given."""

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """What does not change from point to point.

    Attributes:
        profile: of the largest cluster that is asked about.
        budget: bytes a device; of each type of device where they are unlike.
        pins: what is not left to the search.
        schedules: to choose from where there is a pipeline; None: those that the search takes by itself.
        backend: what is to run the plans.
        memory: the budget as it was asked for, where fewer devices may have another one: a share of their own memory.
        source: the profile of so many devices, where it is not just that of the first of all: fewer devices may all be
            of one type, and train in a better precision.
        mode: what the plans are for.
        delay: which rules of delayed gradients are allowed; None: none.
        margin: share of budgets that predictions keep free.
        tolerance: share of the step time that plans may be from the best.
        sessions: what earlier points have priced, by devices.
    """

    profile: Profile
    budget: int | Budget
    pins: Pins = NOTHING
    schedules: tuple[Schedule, ...] | None = None
    backend: str = "galvatron"
    memory: str | int | None = None
    source: Callable[[int], Profile] | None = None
    mode: Mode = Mode.TRAINING
    delay: Delay | None = None
    margin: float = 0.0
    tolerance: float = 0.0
    sessions: dict[int, Session] = field(default_factory=dict, compare=False, repr=False)

    def session(self, devices: int) -> Session:
        """The session of the cluster that the first devices make.

        Raises:
            InputError: a number of devices that the cluster cannot be cut to.
        """
        if devices not in self.sessions:
            self.sessions[devices] = Session(self._profile(devices), self.mode)
        return self.sessions[devices]

    def _profile(self, devices: int) -> Profile:
        cluster = self.profile.cluster
        if self.source is not None and devices != cluster.devices and not cluster.alike:
            return self.source(devices)
        return self.profile.on(first_devices(cluster, devices))

    def budget_at(self, devices: int) -> int | Budget:
        """Bytes a device of the first devices.

        Raises:
            InputError: more than one of them has.
        """
        if self.memory is None:
            return self.budget
        return budget_on(self.session(devices).profile.cluster, self.memory)


@dataclass(frozen=True, slots=True)
class Point:
    """The fastest plan for a number of devices, a batch and a budget; or why there is none.

    Attributes:
        devices: how many.
        batch: samples a step.
        budget: bytes a device; the least where types of devices have unlike ones.
        plan: the fastest; None where there is none, or where it was not looked for.
        reason: why there is no plan; empty where there is one.
        needs: bytes a device that would be enough, where that is known and the reason.
    """

    devices: int
    batch: int
    budget: int
    plan: Plan | None = None
    reason: str = ""
    needs: int | None = None

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
    """What a sweep has looked at.

    Attributes:
        points: in the order they were looked at.
        complete: False where it was interrupted: what was not looked at may hold better ones.
    """

    points: tuple[Point, ...] = ()
    complete: bool = True


def batch_for(devices: int, batch: int | None) -> int:
    """Samples a step: those given, else 8 a device."""
    return SAMPLES_PER_DEVICE * devices if batch is None else batch


def ask(
    setting: Setting,
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
    """The fastest plan on the first devices of the setting's cluster; see ``search.planner.find_plan``.

    Raises:
        InputError: a batch or a pinned value that cannot be used.
        InfeasibleError: nothing fits.
    """
    session = setting.session(devices)
    return find_plan(
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


def look(
    setting: Setting,
    devices: int,
    batch: int,
    budget: int | Budget | None = None,
    progress: Progress | None = None,
) -> Point:
    """A point of a sweep: one without a plan says why."""
    point = Point(devices, batch, bytes_on(setting.budget if budget is None else budget, ""))
    try:
        given = setting.budget_at(devices) if budget is None else budget
        point = replace(point, budget=bytes_on(given, ""))
        return replace(point, plan=ask(setting, devices, batch, budget=given, progress=progress))
    except InfeasibleError as error:
        return replace(point, reason=str(error), needs=error.smallest_budget)
    except InputError as error:
        return replace(point, reason=str(error))


def gathered(points: Iterator[Point]) -> Points:
    """The points of a sweep; those so far where it is interrupted (Ctrl-C), once one of them has a plan.

    Raises:
        KeyboardInterrupt: there is no plan yet.
    """
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
    """Raise where no point has a plan.

    Raises:
        InfeasibleError: with the reason of the last point.
    """
    if points.points and all(point.plan is None for point in points.points):
        last = points.points[-1]
        raise InfeasibleError(last.reason, last.needs)
