"""The assignment of branches to groups of devices as an integer programme (``parallelism.branch.cost``).

Variables: y_g, whether a group g (a run of devices) is used; x_bgo, whether branch b runs on it by its option o; t_p,
the seconds of phase p; w_g, the bytes that a group works with.

    minimise sum_p t_p
    sum_go x_bgo = 1 for every b            x_bgo <= y_g              sum_g y_g >= least
    sum over the groups of a device of y_g <= 1 for every device
    sum_bo t_bop x_bgo <= t_p               for every g and p
    sum_bo held_bo x_bgo + w_g <= room      and working_bo x_bgo <= w_g
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from galvatron_lite.errors import GalvatronError
from galvatron_lite.parallelism.branch.cost import Assignment, BranchGroup, Job, Option, places
from galvatron_lite.search.programme.pulp_adapter import IntegerProgramme, Solution, SolverVerdict, solve

_ROUNDING = 1e-6
Chosen = Mapping[tuple[int, int, int], int]
"""Variable of a branch, a group and an option, by their numbers."""


def assign_by_programme(
    jobs: Sequence[Job], devices: int, room: int, node: int, least: int = 1, seconds: float = 60.0
) -> Assignment | None:
    """``assign.exact`` by an integer programme; None where no assignment is found within the time limit.

    Args:
        jobs, devices, room, node, least: see ``assign``.
        seconds: time limit.
    """
    groups = places(devices, {size for job in jobs for size in job}, node)
    programme = IntegerProgramme()
    used = [programme.variable(binary=True) for _ in groups]
    offered = {
        (branch, number, place): option
        for branch, job in enumerate(jobs)
        for number, group in enumerate(groups)
        for place, option in enumerate(job.get(len(group), ()))
    }
    chosen = {key: programme.variable(binary=True) for key in offered}
    _place(programme, len(jobs), groups, used, chosen, least)
    _time(programme, groups, offered, chosen)
    _memory(programme, groups, offered, chosen, room)
    return _assignment(solve(programme, seconds), groups, offered, chosen)


def certify_assignment(
    assignment: Assignment, jobs: Sequence[Job], devices: int, room: int, node: int, least: int
) -> str:
    """What an integer programme of the same branches says of an assignment, in a line; empty where none is proven.

    Raises:
        GalvatronError: both are proven, and are not equal.
    """
    other = assign_by_programme(jobs, devices, room, node, least) if assignment.proven else None
    if other is None or not other.proven:
        return ""
    said = f"groups of {len(jobs)} branches: {assignment.seconds:.9g} s, integer programme {other.seconds:.9g} s"
    if abs(other.seconds - assignment.seconds) > _ROUNDING * assignment.seconds:
        raise GalvatronError(f"The assignment and the integer programme disagree: {said}. Please report this.")
    return said


def _place(
    programme: IntegerProgramme, branches: int, groups: Sequence[range], used: Sequence[int], chosen: Chosen, least: int
) -> None:
    """Every branch has one option in a group that is used; groups are apart, and enough of them hold a branch."""
    for branch in range(branches):
        programme.equal.append(({one: 1.0 for key, one in chosen.items() if key[0] == branch}, 1.0))
    for (_, number, _), variable in chosen.items():
        programme.at_most.append(({variable: 1.0, used[number]: -1.0}, 0.0))
    for number, variable in enumerate(used):
        held = {one: -1.0 for key, one in chosen.items() if key[1] == number}
        programme.at_most.append(({variable: 1.0, **held}, 0.0))
    for device in sorted({device for group in groups for device in group}):
        around = {used[number]: 1.0 for number, group in enumerate(groups) if device in group}
        programme.at_most.append((around, 1.0))
    programme.at_most.append((dict.fromkeys(used, -1.0), -float(least)))


def _time(
    programme: IntegerProgramme, groups: Sequence[range], offered: Mapping[tuple[int, int, int], Option], chosen: Chosen
) -> None:
    phases = max((len(option.seconds) for option in offered.values()), default=0)
    for phase in range(phases):
        whole = programme.variable(binary=False)
        programme.objective[whole] = 1.0
        for number in range(len(groups)):
            own = {chosen[key]: one.seconds[phase] for key, one in offered.items() if key[1] == number}
            programme.at_most.append(({**own, whole: -1.0}, 0.0))


def _memory(
    programme: IntegerProgramme,
    groups: Sequence[range],
    offered: Mapping[tuple[int, int, int], Option],
    chosen: Chosen,
    room: int,
) -> None:
    """What branches hold adds up in a group, what they work with does not; in shares of the room."""
    unit = 1.0 / max(room, 1)
    for number in range(len(groups)):
        working = programme.variable(binary=False)
        own = {chosen[key]: one for key, one in offered.items() if key[1] == number}
        held = {variable: one.held * unit for variable, one in own.items()}
        programme.at_most.append(({**held, working: 1.0}, 1.0))
        for variable, one in own.items():
            programme.at_most.append(({variable: one.working * unit, working: -1.0}, 0.0))


def _assignment(
    answer: Solution, groups: Sequence[range], offered: Mapping[tuple[int, int, int], Option], chosen: Chosen
) -> Assignment | None:
    if not answer.values:
        return None
    taken: dict[int, list[tuple[int, Option]]] = {}
    for key, option in offered.items():
        if answer.values[chosen[key]] > 0.5:
            taken.setdefault(key[1], []).append((key[0], option))
    found = (BranchGroup(groups[number].start, len(groups[number]), tuple(own)) for number, own in taken.items())
    ordered = tuple(sorted(found, key=lambda group: group.first))
    return Assignment(ordered, proven=answer.verdict is SolverVerdict.PROVEN)
