"""Plans anew, for prices and what-ifs, within a time that is given. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from galvatron_lite.cluster.budget import Budget
from galvatron_lite.errors import GalvatronError
from galvatron_lite.plans.schema import Plan
from galvatron_lite.questions.setting import Setting, ask
from galvatron_lite.search.best_first import MOST_WORK

RUNNERS_UP = 5
"""Of every plan made here: as many as ``galvatron plan`` shows, since the quickest of all is the plan."""
NOT_TRIED = "not tried: the time for it was over"
QUICK = 200_000
"""Labels of a search that need not be proven (``search.best_first``): a second or two where a proof takes ten. Most
models need fewer for a proof."""
Progress = Callable[[int, int, str], None]


class OutOfTimeError(GalvatronError):
    """A search was left because the time given for all of them was over."""


@dataclass(slots=True)
class Clock:
    """Time for planning anew.

    Attributes:
        seconds: in all; None: no end.
        progress: told what is looked at; None: nobody.
        total: how many things are to be looked at.
        done: how many have been.
    """

    seconds: float | None = None
    progress: Progress | None = None
    total: int = 0
    done: int = 0
    _begun: float = field(default_factory=monotonic)

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return self.seconds is not None and monotonic() - self._begun >= self.seconds

    def begin(self, label: str) -> None:
        """Say what is looked at next.

        Raises:
            OutOfTimeError: the time is over.
        """
        if self.over:
            raise OutOfTimeError(NOT_TRIED)
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total, label)
        self.done += 1

    def look(self, *_: object) -> None:
        """What a search calls as it goes on.

        Raises:
            OutOfTimeError: the time is over.
        """
        if self.over:
            raise OutOfTimeError(NOT_TRIED)


def plan_anew(
    setting: Setting,
    clock: Clock,
    devices: int,
    batch: int,
    budget: int | Budget | None = None,
    effort: int = MOST_WORK,
) -> Plan:
    """The fastest plan, as ``galvatron plan`` finds it, or as near to it as so many labels come.

    Raises:
        OutOfTimeError: the time was over before the search was.
        InputError: a batch that cannot be divided.
        InfeasibleError: nothing fits.
    """
    return ask(setting, devices, batch, budget=budget, runners_up=RUNNERS_UP, progress=clock.look, effort=effort)


def seconds_of(plan: Plan) -> float:
    """Predicted, of a step; infinite without a prediction."""
    return float("inf") if plan.prediction is None else plan.prediction.step_seconds


def peak_of(plan: Plan) -> int:
    """Predicted bytes on the fullest device; 0 without a prediction."""
    return 0 if plan.prediction is None else plan.prediction.peak_memory


def gap_of(plan: Plan) -> float:
    """How far from the fastest the plan may be, as a share; 0 where it is proven."""
    return 0.0 if plan.provenance is None else plan.provenance.gap
