"""Accuracy of both kinds of formulas on measured epochs and iterations, and forecasts as plain data.

Accuracy is 1 - |predicted - measured| / measured, as in Kahira et al. 2021 (arXiv:2104.09075, section 5).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from statistics import fmean
from typing import Any

from galvatron_lite.errors import GalvatronError
from galvatron_lite.files import Strict, from_data, read_data
from galvatron_lite.folders import profile_folder
from galvatron_lite.oracle.closed_form import Case, estimate
from galvatron_lite.oracle.layers import fabric_links
from galvatron_lite.oracle.pricing import ClusterCosts, cluster_costs, price_row
from galvatron_lite.oracle.request import fabric_named, graph_named, network_named
from galvatron_lite.oracle.rows import Forecast, ForecastRow, Method, RowQuestion, findings
from galvatron_lite.stacks.catalog import match_stack

CLUSTER, PRECISION = "abci", "fp32"
FRAMEWORKS = {"report": "Chainer/ChainerMN, layer-wise collectives by NCCL", "logs": "Chainer/ChainerMN"}
"""Cluster, precision and (by origin) software of the measured rows."""
FORMULAS = ("paradl", "galvatron", "published")
"""The closed forms, the planner's cost model, and the printed predictions of the authors' oracle."""


@dataclass(frozen=True, slots=True)
class MeasuredRow(Strict):
    """One measured row."""

    origin: str  # ``report`` or ``logs``
    model: str  # name of a table of layers
    strategy: Method
    devices: int
    batch: int  # samples of a replica
    per: str  # ``epoch`` or ``iteration``
    seconds: float  # measured seconds of it
    compute: float = 0.0  # seconds of compute in the report; 0: not printed
    communication: float = 0.0  # seconds of communication in the report; 0: not printed
    projected: float = 0.0  # prediction of the authors' oracle; 0: not printed
    note: str = ""  # for people

    def epoch(self, seconds: float) -> float:
        """Convert seconds of an epoch or iteration, as in this row, to seconds of an epoch."""
        if self.per == "epoch":
            return seconds
        samples = network_named(self.model).samples
        return seconds * RowQuestion(self.strategy, self.devices, self.batch, samples).iterations


@dataclass(frozen=True, slots=True)
class RowCheck:
    """A measured row and its predictions."""

    row: MeasuredRow
    predicted: dict[str, float | None]  # seconds by formulas; None without a prediction
    problems: dict[str, str] = field(default_factory=dict)  # why there is none, by formulas

    def accuracy(self, formulas: str) -> float | None:
        """Return 1 - |error| / measured; None without a prediction."""
        seconds = self.predicted.get(formulas)
        return None if seconds is None else 1 - abs(seconds - self.row.seconds) / self.row.seconds


def measured_rows() -> tuple[MeasuredRow, ...]:
    """Return the rows of ``profiles/paradl/measured.yaml``, whose ``from`` is the origin."""
    path = profile_folder("paradl") / "measured.yaml"
    rows = [
        {"origin" if name == "from" else name: value for name, value in row.items()} for row in read_data(path)["rows"]
    ]
    return tuple(from_data(MeasuredRow, row, f"{path}, {number}") for number, row in enumerate(rows))


def software_notes() -> dict[str, str]:
    """Return notes on the software by strategy, if it ran something else than the strategy's name says."""
    notes: dict[str, str] = read_data(profile_folder("paradl") / "measured.yaml")["software"]
    return {name: " ".join(note.split()) for name, note in notes.items()}


def check_rows(rows: Sequence[MeasuredRow]) -> tuple[RowCheck, ...]:
    """Predict the rows by the closed forms and by the planner's cost model."""
    most, batches = defaultdict[tuple[str, str], int](int), dict[tuple[str, str], int]()
    for row in rows:
        key = row.origin, row.model
        most[key], batches[key] = max(most[key], row.devices), row.batch
    machines = {(origin, model): _machine(origin, model, devices, batches[origin, model])
                for (origin, model), devices in most.items()}  # fmt: skip
    return tuple(_check(row, machines[row.origin, row.model]) for row in rows)


def _machine(origin: str, model: str, devices: int, batch: int) -> ClusterCosts | str:
    """Return the planner's costs of a model on the rows' cluster, or why there are none."""
    try:
        graph = graph_named(network_named(model).graph or model, PRECISION)
        return cluster_costs(graph, CLUSTER, devices, PRECISION, batch, match_stack(FRAMEWORKS[origin]))
    except GalvatronError as error:
        return str(error)


def _check(row: MeasuredRow, model_costs: ClusterCosts | str) -> RowCheck:
    """Predict one row; the closed forms are without quirks and with the default setting of the network."""
    predicted, problems = dict[str, float | None](), dict[str, str]()
    network, fabric = network_named(row.model), fabric_named(CLUSTER)
    assert fabric is not None
    question = RowQuestion(row.strategy, row.devices, row.batch, network.samples)
    case = Case(row.strategy, row.devices, row.batch, network.samples, network=network, wires=fabric_links(fabric))
    try:
        epoch = estimate(case).epoch
        predicted["paradl"] = epoch if row.per == "epoch" else epoch / case.iterations
    except GalvatronError as error:
        problems["paradl"] = str(error)
    if isinstance(model_costs, str):
        problem = model_costs
    else:
        priced = price_row(model_costs, question)
        predicted["galvatron"], problem = priced.epoch if row.per == "epoch" else priced.iteration, priced.problem
    if problem:
        predicted["galvatron"], problems["galvatron"] = None, problem
    predicted["published"] = row.projected or None
    return RowCheck(row, {name: predicted.get(name) for name in FORMULAS}, problems)


@dataclass(frozen=True, slots=True)
class Score:
    """Mean accuracy of some rows."""

    name: str
    rows: int
    accuracy: dict[str, float | None]  # by formulas; None without a prediction of any row


def _grouped(checks: Sequence[RowCheck], key: Callable[[MeasuredRow], str]) -> dict[str, list[RowCheck]]:
    groups = defaultdict[str, list[RowCheck]](list)
    for check in checks:
        groups[key(check.row)].append(check)
    return groups


def scores(checks: Sequence[RowCheck], key: Callable[[MeasuredRow], str]) -> tuple[Score, ...]:
    """Return the mean accuracy of groups of rows, in the order they first appear."""
    return tuple(
        Score(name, len(group), {formulas: mean_accuracy(group, formulas) for formulas in FORMULAS})
        for name, group in _grouped(checks, key).items()
    )


def mean_accuracy(checks: Iterable[RowCheck], formulas: str) -> float | None:
    """Return the mean accuracy of rows with a prediction."""
    accuracies = [accuracy for check in checks if (accuracy := check.accuracy(formulas)) is not None]
    return fmean(accuracies) if accuracies else None


@dataclass(frozen=True, slots=True)
class Ranking:
    """Strategies of one model, number of devices and origin, fastest first."""

    name: str  # name of the group
    measured: tuple[str, ...]
    predicted: dict[str, tuple[str, ...]]  # by formulas; strategies without a prediction are left out
    right: dict[str, bool]  # by formulas, whether no pair is in the wrong order (ties are not wrong)


def rankings(checks: Sequence[RowCheck]) -> tuple[Ranking, ...]:
    """Rank all groups of two or more strategies by seconds of an epoch."""
    results = []
    for name, group in _grouped(checks, lambda row: f"{row.model} on {row.devices} ({row.origin})").items():
        measured = {check.row.strategy.value: check.row.epoch(check.row.seconds) for check in group}
        predicted, right = dict[str, tuple[str, ...]](), dict[str, bool]()
        for formulas in FORMULAS:
            epochs = {
                check.row.strategy.value: check.row.epoch(seconds)
                for check in group
                if (seconds := check.predicted.get(formulas)) is not None
            }
            is_wrong = any(
                (measured[i] - measured[j]) * (epochs[i] - epochs[j]) < 0 for i, j in combinations(epochs, 2)
            )
            predicted[formulas] = tuple(sorted(epochs, key=epochs.__getitem__))
            right[formulas] = len(epochs) > 1 and not is_wrong
        if len(group) > 1:
            results.append(Ranking(name, tuple(sorted(measured, key=measured.__getitem__)), predicted, right))
    return tuple(results)


DIGITS = 12  # significant digits of figures, as the released oracle prints


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def as_data(forecast: Forecast) -> dict[str, Any]:
    """Return a forecast and its findings as plain data, in seconds and bytes."""
    names = ("model", "cluster", "formulas", "samples", "origin")
    lines = [
        {"strategy": line.strategy, "limit": asdict(line.limit), "rows": [_row(row) for row in line.rows]}
        for line in forecast.lines
    ]
    bottlenecks = [_rounded(asdict(finding) | {"sort": finding.sort.value}) for finding in findings(forecast)]
    return {name: getattr(forecast, name) for name in names} | {
        "notes": list(forecast.notes), "strategies": lines, "bottlenecks": bottlenecks,
    }  # fmt: skip


def _row(row: ForecastRow) -> dict[str, Any]:
    if row.problem:
        return {"gpus": row.devices, "batch": row.batch, "problem": row.problem}
    names = ("waiting", "other", "epoch", "iteration", "memory", "capacity", "fits")
    data: dict[str, Any] = _rounded(
        {
            "iterations": row.iterations,
            "compute": row.compute,
            "communication": row.moved.total,
            "communication_parts": asdict(row.moved),
            "congestion": row.congested,
            "weight_update": row.update,
            **{name: getattr(row, name) for name in names},
            "largest_batch": row.largest or None,
        }
    )
    return {"gpus": row.devices, "batch": row.batch} | data


def checks_data(checks: tuple[RowCheck, ...]) -> dict[str, Any]:
    """Return measured rows, their predictions and accuracy as plain data."""
    rows = [
        asdict(check.row)
        | {"strategy": check.row.strategy.value, "predicted": check.predicted, "problems": check.problems}
        | {"accuracy": {formulas: check.accuracy(formulas) for formulas in FORMULAS}}
        for check in checks
    ]
    by = scores(checks, lambda row: f"{row.origin}: {row.strategy.value} {row.model}")
    return {
        "rows": _rounded(rows),
        "scores": [_rounded(asdict(score)) for score in by],
        "mean": {formulas: _rounded(mean_accuracy(checks, formulas)) for formulas in FORMULAS},
        "rankings": [asdict(ranking) for ranking in rankings(checks)],
        "software": software_notes(),
    }
