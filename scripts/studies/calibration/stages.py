"""Calibrates in two stages: what stacks have in common, then each stack's own.

1. Devices, links and the default stack are fitted as if all rows ran on one stack. What is documented of a stack (which
   communication it overlaps, which attention kernel it runs) stays: its numbers are the default's times the ratio of
   the two priors, and its shares of hidden communication are its priors. So the default serves stacks that were never
   seen as well as one set of numbers can.
2. With devices and links held, each stack is fitted around those numbers; a stack of few rows stays near them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from galvatron_lite.calibration.parameters import Parameter, parameters_of, scaled_values
from galvatron_lite.calibration.schema import Calibration, StackConstants
from galvatron_lite.calibration.store import DEFAULT
from studies.calibration.fit import Fit, PredictMany, Problem, Unknowns, errors_of, fit, jacobian_of, unknowns_of

FOLD_STEPS = 5
"""Steps of a fit that leaves rows out, at most; its derivatives are good from the start."""

LEAST_ROWS = 3  # rows that must use an entry for its constants to be fitted

APART = frozenset({DEFAULT})  # stacks that are not predicted as the default's: itself

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Staged:
    """Both stages."""

    common_unknowns: Unknowns  # common_unknowns, common_fit: of the first
    common_fit: Fit
    unknowns: Unknowns  # unknowns, fit: of the second stage
    fit: Fit

    @property
    def common(self) -> Calibration:
        """Every stack as if it had never been seen."""
        return self.common_unknowns.at(self.common_fit.places)

    @property
    def calibration(self) -> Calibration:
        """Every stack with its own numbers."""
        return self.unknowns.at(self.fit.places)


def as_default(priors: Calibration, calibration: Calibration) -> Calibration:
    """Every stack with the default's numbers and what is documented of it."""
    default, usual = calibration.stacks[DEFAULT], priors.stacks[DEFAULT]
    made = {
        name: calibration.stacks[name] if name in APART else _documented(default, usual, prior)
        for name, prior in priors.stacks.items()
    }
    return replace(calibration, stacks=made)


def _documented(default: StackConstants, usual: StackConstants, prior: StackConstants) -> StackConstants:
    ratios = {
        item.name: getattr(default, item.name) * getattr(prior, item.name) / getattr(usual, item.name)
        for item in fields(StackConstants)
        if item.name != "hidden" and getattr(usual, item.name) > 0
    }
    return replace(default, hidden=prior.hidden, **ratios)


def entries_fitted(problem: Problem) -> set[str]:
    """Entries that enough rows use."""
    owners = Counter(owner for row in problem.fitted for owner in problem.uses[row])
    return {owner for owner, count in owners.items() if count >= LEAST_ROWS}


def common_problem(problem: Problem) -> Problem:
    """The rows of the first stage: all depend on the default stack."""
    uses = [frozenset(o for o in used if not o.startswith("stacks/")) | {f"stacks/{DEFAULT}"} for used in problem.uses]
    return replace(problem, uses=uses)


@dataclass(frozen=True, slots=True)
class Setup:
    """What is fitted in either stage, whichever rows are left out."""

    priors: Calibration  # sourced values; every fit starts from them
    common: Unknowns  # unknowns of the first stage
    own: tuple[Parameter, ...]  # numbers fitted in the second

    def own_unknowns(self, common: Calibration) -> Unknowns:
        """Of the second stage, around what stacks have in common."""
        made = unknowns_of(self.priors, self.own)
        return replace(made, prior=np.array(scaled_values(common, self.own)), base=common)


def setup_of(problem: Problem, priors: Calibration) -> Setup:
    """Everything that enough rows use; in the first stage what is hidden is documented, not fitted."""
    owners = entries_fitted(problem)
    stacks = {owner for owner in owners if owner.startswith("stacks/")} - {f"stacks/{name}" for name in APART}
    shared = [p for p in parameters_of(priors, owners - stacks | {f"stacks/{DEFAULT}"}) if p.field not in _ELSEWHERE]
    common = unknowns_of(priors, shared, partial(as_default, priors))
    return Setup(priors, common, parameters_of(priors, stacks))


_ELSEWHERE = ("hidden", "convolution")
"""Not fitted in the first stage: documented, and fitted to runs of image models."""


Report = Callable[[str], None]  # is told of each step


def _silent(_: str) -> None:
    """Tells nobody."""


def calibrated(
    problem: Problem, setup: Setup, predict: PredictMany, *, steps: int = 8, report: Report | None = None
) -> Staged:
    """Both stages, from the priors on, with derivatives taken twice."""
    say = report or _silent
    found = _fitted(common_problem(problem), setup.common, predict, steps, lambda text: say(f"stage 1, {text}"))
    own = setup.own_unknowns(setup.common.at(found.places))
    parts = []
    for part in parts_of(problem, own):
        parts.append(_fitted(part.problem, part.unknowns, predict, steps, partial(_prefixed, say, part.stack)))
    return Staged(setup.common, found, own, joined(problem, own, parts))


@dataclass(frozen=True, slots=True)
class Part:
    """One stack of the second stage, with which no other has a number in common."""

    stack: str  # its entry (``stacks/nemo``)
    problem: Problem  # its rows
    unknowns: Unknowns  # its numbers
    columns: list[int]  # which of all unknowns these are


def parts_of(problem: Problem, own: Unknowns) -> list[Part]:
    """The second stage by stack."""
    parts = []
    for stack in dict.fromkeys(parameter.owner for parameter in own.parameters):
        columns = [number for number, parameter in enumerate(own.parameters) if parameter.owner == stack]
        unknowns = replace(
            own,
            parameters=tuple(own.parameters[column] for column in columns),
            prior=own.prior[columns],
            deviation=own.deviation[columns],
        )
        parts.append(Part(stack, problem.without(np.array([stack not in u for u in problem.uses])), unknowns, columns))
    return parts


def joined(problem: Problem, own: Unknowns, fits: Sequence[Fit]) -> Fit:
    """The fits of all stacks as one."""
    parts = parts_of(problem, own)
    places, residuals = own.prior.copy(), np.zeros(len(problem.measured))
    jacobian = np.zeros((len(residuals), len(places)))
    for part, fitted in zip(parts, fits, strict=True):
        places[part.columns] = fitted.places
        residuals += fitted.residuals
        jacobian[:, part.columns] = fitted.jacobian
    return Fit(places, residuals, jacobian, sum(fitted.objective for fitted in fits))


def _prefixed(say: Report, stack: str, text: str) -> None:
    say(f"{stack}, {text}")


def _fitted(problem: Problem, unknowns: Unknowns, predict: PredictMany, steps: int, report: Report) -> Fit:
    def told(number: int, found: Fit) -> None:
        error = float(np.abs(errors_of(found.residuals[problem.fitted])).mean())
        report(f"step {number}: objective {found.objective:.2f}, mean error {error:.1%}")

    first = fit(problem, unknowns, predict, steps=steps, report=told)
    slopes = jacobian_of(problem, unknowns, first.places, predict)
    again = fit(problem, unknowns, predict, start=first.places, jacobian=slopes, steps=steps, report=told)
    return replace(again, jacobian=slopes)


def common_without(left_out: Mask, problem: Problem, setup: Setup, whole: Staged, predict: PredictMany) -> Calibration:
    """Every stack as if it had never been seen, calibrated without some rows: the first stage alone.

    The fit starts from the priors; derivatives are those of the whole fit, which only guide the steps.
    """
    kept = common_problem(problem).without(left_out)
    return setup.common.at(
        fit(kept, setup.common, predict, jacobian=whole.common_fit.jacobian, steps=FOLD_STEPS).places
    )


def calibrated_without(
    left_out: Mask, problem: Problem, setup: Setup, whole: Staged, predict: PredictMany
) -> Calibration:
    """Both stages without some rows; see ``common_without``."""
    own, kept = setup.own_unknowns(common_without(left_out, problem, setup, whole, predict)), problem.without(left_out)
    fits = [
        fit(part.problem, part.unknowns, predict, jacobian=whole.fit.jacobian[:, part.columns], steps=FOLD_STEPS)
        for part in parts_of(kept, own)
    ]
    return own.at(joined(kept, own, fits).places)
