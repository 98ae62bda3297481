"""What a report shows of a plan, and what it leaves out. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from galvatron_lite.errors import FileFormatError, GalvatronError, InputError

if TYPE_CHECKING:
    from galvatron_lite.cost.timeline import Timeline
    from galvatron_lite.explainer.schema import Explanation
    from galvatron_lite.plans.schema import Plan
    from galvatron_lite.profiler.schema import Profile
    from galvatron_lite.questions.front import Front
    from galvatron_lite.runs.read import Run

NO_PROFILE = (
    "The timeline, memory over time, the cluster's nodes and the front need what the plan was priced with: give "
    "--profile FILE, or --model and --cluster."
)


@dataclass(frozen=True, slots=True)
class Source:
    """What plans are priced with, as a command line gives it; see ``api.plan``.

    Attributes:
        profile: file.
        model, cluster, gpus, sequence, precision, mem, batch: as for ``galvatron evaluate``.
    """

    profile: Path | None = None
    model: str | None = None
    cluster: str | None = None
    gpus: int | None = None
    sequence: int | None = None
    precision: str | None = None
    mem: str | None = None
    batch: int | None = None

    @property
    def given(self) -> bool:
        """Whether it says what to price with."""
        return self.profile is not None or self.model is not None


@dataclass(frozen=True, slots=True)
class Shown:
    """A plan and all that is known of it.

    Attributes:
        name: of its file.
        plan: with its prediction, where it could be priced.
        profile: what it is priced with; None where that is not known.
        timeline: of a step; None where there is none.
        front: memory against time; None where it was not looked for.
        explanation: why it is as it is; None where it was not asked for.
        run: what was measured; None where no run is given.
        missing: what is not shown, and why, a sentence each.
    """

    name: str
    plan: Plan
    profile: Profile | None = None
    timeline: Timeline | None = None
    front: Front | None = None
    explanation: Explanation | None = None
    run: Run | None = None
    missing: tuple[str, ...] = field(default=())

    def budget_of(self, stage: int) -> int:
        """Bytes that a device of a stage may take; 0: not known."""
        made_from = self.plan.provenance
        return 0 if made_from is None else made_from.budget_of(self.plan.stages[stage])


def gather(path: Path, source: Source) -> Shown:
    """A plan from its file, priced, with the timeline of its step.

    Args:
        path: of a plan.
        source: what to price with. Where it does not say, what the plan says it was made from is looked for: the last
            profile made here, those in ``profiles/``, or an estimate of its model on its cluster.

    Raises:
        InputError: a file that is no plan, or does not fit what it is to be priced with.
    """
    known, plan = _priced(path, source)
    if known is None:
        return Shown(path.name, plan, missing=(NO_PROFILE,))
    return with_timeline(Shown(path.name, plan, known))


def with_timeline(shown: Shown) -> Shown:
    """With the timeline of its step, or why it has none."""
    from galvatron_lite.cost.timeline import timeline, untimed

    if shown.profile is None:
        return shown
    why = untimed(shown.plan)
    if why:
        return replace(shown, missing=(*shown.missing, why))
    return replace(shown, timeline=timeline(shown.profile, shown.plan))


def _priced(path: Path, source: Source) -> tuple[Profile | None, Plan]:
    from galvatron_lite import api
    from galvatron_lite.plans.io import read_plan
    from galvatron_lite.profiler.store import profile_hash

    if source.given:
        known = api.find_profile(
            source.profile, model=source.model, cluster=source.cluster, gpus=source.gpus, sequence=source.sequence,
            precision=source.precision,
        )  # fmt: skip
        own = _own_plan(path)
        same = own is not None and own.provenance is not None and own.provenance.profile_hash == profile_hash(known)
        if own is not None and same and source.mem is None and source.batch is None:
            return known, own
        return known, api.evaluate(path, known, mem=source.mem, batch=source.batch)
    plan = read_plan(path)
    return profile_of(plan), plan


def _own_plan(path: Path) -> Plan | None:
    """A plan of ours; None for other files that can be priced."""
    from galvatron_lite.plans.io import read_plan

    try:
        return read_plan(path)
    except FileFormatError:
        return None


def profile_of(plan: Plan) -> Profile | None:
    """The very profile that a plan says it was made from, found as ``explain`` finds it; None where it is not here."""
    from galvatron_lite import api_sources

    try:
        return api_sources.profile_of(plan)
    except (GalvatronError, OSError):
        return None


def with_run(shown: Shown, run: Run) -> Shown:
    """With what was measured, and a word where the run was of another plan."""
    if _bare(run.plan) == _bare(shown.plan):
        return replace(shown, run=run)
    said = f"The run in {run.folder} was last under another plan than this one: what was measured is of that plan."
    return replace(shown, run=run, missing=(*shown.missing, said))


def _bare(plan: Plan) -> Plan:
    """What a plan does, without what it was predicted to cost and made from."""
    from galvatron_lite.plans.schema import MemoryBreakdown

    stages = tuple(replace(one, memory=MemoryBreakdown(), microbatch_seconds=0.0, device="") for one in plan.stages)
    return replace(plan, stages=stages, prediction=None, provenance=None, alternatives=(), left_out=(), order=None)


def check_priced(shown: Shown) -> Shown:
    """The same.

    Raises:
        InputError: there is nothing to show of it but what its file says.
    """
    if shown.plan.prediction is None:
        raise InputError(
            "plan", shown.name,
            "It has no prediction: give --profile FILE, or --model and --cluster, to price it with.",
        )  # fmt: skip
    return shown
