"""Measured epochs and iterations, and how near either kind of formulas comes to them.

Accuracy is 1 - |predicted - measured| / measured, as Kahira et al. 2021 (arXiv:2104.09075, section 5) have it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from math import ceil
from statistics import fmean
from typing import Any

from galvatron_lite.configs_path import profile_folder
from galvatron_lite.errors import GalvatronError
from galvatron_lite.files import Strict, from_data, read_data
from galvatron_lite.oracle.closed_form import Case, estimate
from galvatron_lite.oracle.layers import wires_of
from galvatron_lite.oracle.pricing import ClusterCosts, machine_of, row_of
from galvatron_lite.oracle.request import fabric_named, graph_named, network_named
from galvatron_lite.oracle.rows import Forecast, ForecastRow, Method, StrategyLine, findings
from galvatron_lite.oracle.strategies import RowQuestion
from galvatron_lite.stacks.catalog import match_stack

CLUSTER, PRECISION = "abci", "fp32"
FRAMEWORKS = {"report": "Chainer/ChainerMN, layer-wise collectives by NCCL", "logs": "Chainer/ChainerMN"}
"""Where and with which software the rows were measured, by origin."""


@dataclass(frozen=True, slots=True)
class MeasuredRow(Strict):
    """One measured row."""

    origin: str  # ``report`` or ``logs``
    model: str  # a table of layers
    strategy: Method  # how it was split
    devices: int
    batch: int  # samples of a replica
    per: str  # what ``seconds`` are of: an epoch or an iteration
    seconds: float  # measured
    compute: float = 0.0  # compute, communication: what the report says they are made of; 0 where it does not
    communication: float = 0.0
    projected: float = 0.0  # what the authors' oracle said; 0 where it is not printed
    note: str = ""  # what to know of it


@dataclass(frozen=True, slots=True)
class RowCheck:
    """A measured row and what the formulas say."""

    row: MeasuredRow  # the measured one
    # seconds by formulas (``paradl``, ``galvatron``, ``published``), None where there is no figure
    predicted: dict[str, float | None]
    problems: dict[str, str] = field(default_factory=dict)  # why there is none

    def accuracy(self, formulas: str) -> float | None:
        """1 - |error| / measured; None without a prediction."""
        found = self.predicted.get(formulas)
        return None if found is None else 1 - abs(found - self.row.seconds) / self.row.seconds


FORMULAS = ("paradl", "galvatron", "published")
"""The closed forms, the planner's cost model, and what the authors' oracle printed of these rows."""


def measured_rows() -> tuple[MeasuredRow, ...]:
    """The rows under ``profiles/paradl/measured.yaml``."""
    path = profile_folder("paradl") / "measured.yaml"
    rows = read_data(path)["rows"]
    return tuple(from_data(MeasuredRow, _renamed(row), f"{path}, {number}") for number, row in enumerate(rows))


def software_notes() -> dict[str, str]:
    """What was really run, by strategy, where that is not what the strategy's name says."""
    notes: dict[str, str] = read_data(profile_folder("paradl") / "measured.yaml")["software"]
    return {name: " ".join(note.split()) for name, note in notes.items()}


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
    return {"origin" if name == "from" else name: value for name, value in row.items()}


def check_rows(rows: Sequence[MeasuredRow]) -> tuple[RowCheck, ...]:
    """Every row against the closed forms and the planner's cost model."""
    origins = {row.origin for row in rows}
    machines = {origin: _machines((row for row in rows if row.origin == origin), origin) for origin in origins}
    return tuple(_check(row, machines[row.origin]) for row in rows)


def _machines(rows: Iterable[MeasuredRow], origin: str) -> dict[str, ClusterCosts | str]:
    """The planner's costs of each model on the rows' cluster; why there are none where there are none."""
    most, batches = defaultdict[str, int](int), dict[str, int]()
    for row in rows:
        most[row.model], batches[row.model] = max(most[row.model], row.devices), row.batch
    found: dict[str, ClusterCosts | str] = {}
    for model, devices in most.items():
        try:
            graph = graph_named(network_named(model).graph or model, PRECISION)
            stack = match_stack(FRAMEWORKS[origin])
            found[model] = machine_of(graph, CLUSTER, devices, PRECISION, batches[model], stack)
        except GalvatronError as error:
            found[model] = str(error)
    return found


def _check(row: MeasuredRow, machines: dict[str, ClusterCosts | str]) -> RowCheck:
    ways: dict[str, Callable[[], float]] = {
        "paradl": lambda: closed_seconds(row),
        "galvatron": lambda: priced_seconds(row, machines[row.model]),
    }
    predicted, problems = dict[str, float | None](), dict[str, str]()
    for name, way in ways.items():
        try:
            predicted[name] = way()
        except GalvatronError as error:
            predicted[name], problems[name] = None, str(error)
    return RowCheck(row, predicted | {"published": row.projected or None}, problems)


def closed_seconds(row: MeasuredRow) -> float:
    """What the closed forms say of a row, without quirks, with the network's default setting."""
    fabric = fabric_named(CLUSTER)
    assert fabric is not None
    case = Case(network_named(row.model), wires_of(fabric), row.strategy, row.devices, row.batch)
    found = estimate(case).epoch
    return found if row.per == "epoch" else found / case.iterations


def priced_seconds(row: MeasuredRow, machine: ClusterCosts | str) -> float:
    """What the planner's cost model says of a row."""
    if isinstance(machine, str):
        raise GalvatronError(machine)
    samples = network_named(row.model).samples
    found = row_of(machine, RowQuestion(row.strategy, row.devices, row.batch, samples))
    if found.problem:
        raise GalvatronError(found.problem)
    return found.epoch if row.per == "epoch" else found.iteration


@dataclass(frozen=True, slots=True)
class Score:
    """How near some rows are predicted."""

    name: str  # which rows
    rows: int
    accuracy: dict[str, float | None]  # mean by formulas; None where none of the rows has a prediction


def scores(checks: Sequence[RowCheck], key: Callable[[MeasuredRow], str]) -> tuple[Score, ...]:
    """Mean accuracy of groups of rows, in the order they first appear."""
    groups = defaultdict[str, list[RowCheck]](list)
    for check in checks:
        groups[key(check.row)].append(check)
    return tuple(
        Score(name, len(group), {way: mean_accuracy(group, way) for way in FORMULAS}) for name, group in groups.items()
    )


def mean_accuracy(checks: Iterable[RowCheck], formulas: str) -> float | None:
    """Mean over rows that have a prediction."""
    known = [found for check in checks if (found := check.accuracy(formulas)) is not None]
    return fmean(known) if known else None


@dataclass(frozen=True, slots=True)
class Ranking:
    """Strategies of one model on one number of devices, from the same source, fastest first."""

    name: str  # of the group
    measured: tuple[str, ...]  # their order
    predicted: dict[str, tuple[str, ...]]  # by formulas; without those that have no prediction
    right: dict[str, bool]  # by formulas, whether no pair is the wrong way round (equal predictions are not wrong)


def rankings(checks: Sequence[RowCheck]) -> tuple[Ranking, ...]:
    """Rankings of every group of two strategies and more, by seconds of an epoch."""
    groups = defaultdict[str, list[RowCheck]](list)
    for check in checks:
        row = check.row
        groups[f"{row.model} on {row.devices} ({row.origin})"].append(check)
    return tuple(_ranking(name, group) for name, group in groups.items() if len(group) > 1)


def _ranking(name: str, group: Sequence[RowCheck]) -> Ranking:
    def named(order: Iterable[RowCheck]) -> tuple[str, ...]:
        return tuple(check.row.strategy.value for check in order)

    predicted, right = dict[str, tuple[str, ...]](), dict[str, bool]()
    for way in FORMULAS:
        known = [(check, found) for check in group if (found := check.predicted.get(way)) is not None]
        times = [(check, _epoch(check.row, found)) for check, found in known]
        predicted[way] = named(check for check, _ in sorted(times, key=lambda pair: pair[1]))
        right[way] = len(times) > 1 and not any(_turned(left, other) for left, other in combinations(times, 2))
    return Ranking(name, named(sorted(group, key=lambda check: _epoch(check.row, check.row.seconds))), predicted, right)


def _turned(left: tuple[RowCheck, float], other: tuple[RowCheck, float]) -> bool:
    measured = _epoch(left[0].row, left[0].row.seconds) - _epoch(other[0].row, other[0].row.seconds)
    return measured * (left[1] - other[1]) < 0


def _epoch(row: MeasuredRow, seconds: float) -> float:
    if row.per == "epoch":
        return seconds
    question = RowQuestion(row.strategy, row.devices, row.batch, 1)
    return seconds * ceil(network_named(row.model).samples / question.global_batch)


DIGITS = 12  # significant digits of a figure: those that the released oracle prints


def rounded(value: Any) -> Any:
    """Plain data with every figure rounded to ``DIGITS``."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    return {name: rounded(item) for name, item in value.items()}


def as_data(forecast: Forecast) -> dict[str, Any]:
    """The forecast and its bottlenecks; seconds and bytes."""
    return {
        "model": forecast.model,
        "cluster": forecast.cluster,
        "formulas": forecast.formulas,
        "samples": forecast.samples,
        "origin": forecast.origin,
        "notes": list(forecast.notes),
        "strategies": [_line(line) for line in forecast.lines],
        "bottlenecks": [rounded(asdict(one) | {"sort": one.sort.value}) for one in findings(forecast)],
    }


def _line(line: StrategyLine) -> dict[str, Any]:
    return {"strategy": line.strategy, "limit": asdict(line.limit), "rows": [_row(row) for row in line.rows]}


def _row(row: ForecastRow) -> dict[str, Any]:
    told: dict[str, Any] = {"gpus": row.devices, "batch": row.batch}
    if row.problem:
        return told | {"problem": row.problem}
    return told | _plain(
        {
            "iterations": row.iterations,
            "compute": row.compute,
            "communication": row.moved.total,
            "communication_parts": asdict(row.moved),
            "congestion": row.congested,
            "weight_update": row.update,
            "waiting": row.waiting,
            "other": row.other,
            "epoch": row.epoch,
            "iteration": row.iteration,
            "memory": row.memory,
            "capacity": row.capacity,
            "fits": row.fits,
            "largest_batch": row.largest or None,
        }
    )


def checks_data(checks: tuple[RowCheck, ...]) -> dict[str, Any]:
    """Measured rows, what is predicted of them, and how near that is."""
    rows = [
        asdict(check.row)
        | {"strategy": check.row.strategy.value}
        | {"predicted": check.predicted, "accuracy": {way: check.accuracy(way) for way in FORMULAS}}
        | {"problems": check.problems}
        for check in checks
    ]
    by = scores(checks, lambda row: f"{row.origin}: {row.strategy.value} {row.model}")
    return {
        "rows": rounded(rows),
        "scores": [rounded(asdict(score)) for score in by],
        "mean": {way: rounded(mean_accuracy(checks, way)) for way in FORMULAS},
        "rankings": [asdict(one) for one in rankings(checks)],
        "software": software_notes(),
    }
