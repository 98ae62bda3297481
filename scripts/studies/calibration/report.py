"""What a calibration found: tables, the file of scores, and the provenance of constants."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import fmean

import numpy as np
from rich.table import Table

from galvatron_lite.calibration.parameters import value_of
from galvatron_lite.calibration.schema import Calibration, ConstantsOrigin
from galvatron_lite.calibration.store import DEFAULT, load_calibration
from galvatron_lite.files import read_data, write_data
from galvatron_lite.stacks.catalog import GALVATRON
from galvatron_lite.validate.results import ScoredRun, Scores, score_families
from studies.calibration.fit import Unknowns, errors_of
from studies.calibration.rows import Rows
from studies.calibration.stages import Setup, Staged, entries_fitted

Ways = dict[str, list[ScoredRun]]  # judged rows by the way they were left out


def graded(judged: Sequence[ScoredRun]) -> list[ScoredRun]:
    """Of each family the rows of grade A, or all where it has none."""
    best = families_of_grade_a(judged)
    return [one for one in judged if one.run.quality == "A" or one.run.family not in best]


def families_of_grade_a(judged: Iterable[ScoredRun]) -> set[str]:
    """Families with measurements of grade A: those of the headline."""
    return {one.run.family for one in judged if one.run.quality == "A"}


def means(scores: dict[str, dict[str, Scores]], families: Sequence[str]) -> dict[str, float]:
    """Plain mean over families of their mean absolute errors, by way; a way without a family takes the one before."""
    found = {}
    before: dict[str, Scores] = {}
    for way, by_family in scores.items():
        before = before | by_family
        found[way] = fmean(before[family].time_mape or 0.0 for family in families)
    return found


def scores_table(ways: Ways) -> Table:
    """Mean errors by family, one column a way of leaving rows out; regret and rank without the model."""
    scores = {way: score_families(graded(judged)) for way, judged in ways.items()}
    first, best = ways["in sample"], families_of_grade_a(ways["in sample"])
    names = [family for family in scores["in sample"] if family in best]
    rest = [family for family in scores["in sample"] if family not in best]
    table = Table("family", "rows", *(f"{way} %" for way in ways), "bias %", "regret %", "rank in groups")
    judge = scores.get("without model", scores["in sample"])
    for part, title in ((names, "macro, grade A"), (rest, "macro, grade B")):
        for family in part:
            errors = [_text(by.get(family), "time_mape", 1) for by in scores.values()]
            extra = [_text(judge[family], *how) for how in (("time_bias", 1), ("regret", 1), ("group_spearman", 3))]
            table.add_row(family, str(judge[family].timed), *errors, *extra)
        if part:
            table.add_section()
            table.add_row(title, "", *(f"{value:.1f}" for value in means(scores, part).values()))
            table.add_section()
    table.add_row("macro, all", f"{len(first)}", *(f"{value:.1f}" for value in means(scores, [*names, *rest]).values()))
    return table


def _text(scores: Scores | None, field: str, digits: int) -> str:
    value = getattr(scores, field, None)
    return "" if value is None else f"{value:.{digits}f}"


def scores_file(ways: Ways, path: Path) -> None:
    """Scores of every way by family, with macro averages, date and commit; what else the file holds stays."""
    scores = {way: score_families(graded(judged)) for way, judged in ways.items()}
    best = families_of_grade_a(ways["in sample"])
    names = {"grade A": sorted(best), "all": sorted(scores["in sample"])}
    data = {
        "date": date.today().isoformat(),
        "commit": _commit(),
        "macro": {
            part: {way: round(v, 2) for way, v in means(scores, some).items()} for part, some in names.items() if some
        },
        "families": {
            family: {"grade": "A" if family in best else "B", "rows": scores["in sample"][family].timed}
            | {way: _figures(by[family]) for way, by in scores.items() if family in by}
            for family in scores["in sample"]
        },
    }
    others = dict(read_data(path)) if path.exists() else {}
    write_data(path, data | {key: value for key, value in others.items() if key not in data})


def expected_error(ways: Ways) -> dict[str, float]:
    """Mean over families of grade A of their mean absolute errors, as shares, by what the fits left out.

    Empty where nothing was left out, or no family is of grade A.
    """
    best = sorted(families_of_grade_a(ways["in sample"]))
    if not best:
        return {}
    found = means({way: score_families(graded(judged)) for way, judged in ways.items()}, best)
    named = {"without_model": "without model", "without_family": "without family"}
    return {name: round(found[way] / 100, 4) for name, way in named.items() if way in found}


def _figures(scores: Scores) -> dict[str, float | None]:
    fields = ("time_mape", "time_median", "time_bias", "regret", "regret_max", "group_spearman", "memory_mape")
    values = {field: getattr(scores, field) for field in fields}
    return {field: None if value is None else round(value, 3) for field, value in values.items()}


def _commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


def changes_table(setup: Setup, whole: Staged) -> Table:
    """What the fit changed most, in standard deviations of the prior; stacks beside what they have in common."""
    table = Table("constant", "prior", "fitted", "deviations")
    for unknowns, calibration in ((setup.common, whole.common), (whole.unknowns, whole.calibration)):
        places = whole.common_fit.places if unknowns is setup.common else whole.fit.places
        _changes(table, unknowns, (places - unknowns.prior) / unknowns.deviation, calibration)
    return table


def _changes(table: Table, unknowns: Unknowns, change: np.ndarray, calibration: Calibration) -> None:
    for index in np.argsort(-np.abs(change)):
        parameter = unknowns.parameters[index]
        if abs(change[index]) > 0.3 or parameter.entry == DEFAULT:
            before = value_of(unknowns.at(unknowns.prior), parameter)
            values = (f"{value:.4g}" for value in (before, value_of(calibration, parameter)))
            table.add_row(parameter.name, *values, f"{change[index]:+.1f}")


def with_origins(whole: Staged, setup: Setup, rows: Rows, source: Path, keep: Collection[str] = ()) -> Calibration:
    """The calibration to ship, with the provenance of every entry that was fitted.

    Entries that were not or are to be kept, and shares of convolutions, stay as they are shipped.
    """
    shipped, made, today = load_calibration(), whole.calibration, date.today().isoformat()
    fitted = (entries_fitted(rows.problem) | {f"stacks/{DEFAULT}"}) - set(keep)
    # No row ran the project's own runtime: it follows the default.
    taken = fitted | {f"stacks/{GALVATRON.name}"} - set(keep)
    origins = dict(shipped.origins)
    kinds = {}
    for kind in ("devices", "links", "stacks"):
        before, after = getattr(shipped, kind), getattr(made, kind)
        kinds[kind] = {
            name: after[name] if f"{kind}/{name}" in taken or name not in before else before[name]
            for name in dict.fromkeys([*before, *after])
        }
    for owner in sorted(fitted):
        origins[owner] = _origin(owner, setup, rows, whole, source, today)
    kinds["devices"] = {
        name: replace(value, convolution=shipped.devices[name].convolution) if name in shipped.devices else value
        for name, value in kinds["devices"].items()
    }
    shared = (shipped.like | setup.priors.like).items()
    like = {name: other for name, other in shared if name.split("/")[1] not in kinds[name.split("/")[0]]}
    families = len({run.family for run in rows.runs})
    text = f"{today}: {len(rows.problem.fitted)} of {len(rows.judged)} language rows of {source}, {families} families"
    return replace(shipped, **kinds, like=like, origins=origins, provenance=(text,), expected_error={})


def _origin(owner: str, setup: Setup, rows: Rows, whole: Staged, source: Path, today: str) -> ConstantsOrigin:
    """Where an entry's constants come from: their priors, then the rows they were fitted to."""
    stack = owner.startswith("stacks/")
    default = owner == f"stacks/{DEFAULT}"
    used = rows.problem.fitted if default else rows.problem.rows_of(owner)
    fit = whole.fit if stack and not default else whole.common_fit
    residual = round(float(np.abs(errors_of(fit.residuals[used])).mean()), 4)
    families = sorted({rows.runs[row].family for row in used})
    told = ", ".join(families) if len(families) <= 8 else f"{len(families)} families"
    prior = setup.priors.origins[owner].source if owner in setup.priors.origins else "prior: the default's"
    how = (
        "with all stacks as one"
        if not stack or default
        else "around the default stack's values, devices and links held"
    )
    text = f"Prior: {prior}. Fitted to measured step times of {source} ({told}), {how}"
    return ConstantsOrigin(text, today, len(used), residual)
