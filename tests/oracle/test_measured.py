"""Measured rows and how near the formulas come to them."""

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from galvatron_lite.oracle.measured import (
    MeasuredRow,
    RowCheck,
    check_rows,
    mean_accuracy,
    measured_rows,
    rankings,
    scores,
)
from galvatron_lite.oracle.rows import Method

from ..docs.pages import ROOT, text_of


def row(strategy: Method, seconds: float, **changes: object) -> MeasuredRow:
    fields = {"origin": "report", "model": "resnet50", "devices": 32, "batch": 64, "per": "epoch"}
    return MeasuredRow(strategy=strategy, seconds=seconds, **fields | changes)  # type: ignore[arg-type]


def test_the_rows_are_those_of_the_report() -> None:
    rows = [one for one in measured_rows() if one.origin == "report" and one.projected and one.compute]
    assert len(rows) == 24
    # 1 - |error| / measured of what the authors projected, as worked out from their table 8.
    judged = [RowCheck(one, {"published": one.projected}) for one in rows]
    spans = {
        ("data+filter", "vgg16"): (0.89, 0.94),
        ("data+filter", "resnet50"): (0.59, 0.88),
        ("data+spatial", "resnet50"): (0.59, 0.70),
        ("data+spatial", "vgg16"): (0.49, 0.54),
    }
    for (strategy, model), (low, high) in spans.items():
        found = [one.accuracy("published") for one in judged if (one.row.strategy, one.row.model) == (strategy, model)]
        assert len(found) == 4
        known = [one for one in found if one is not None]
        assert (min(known), max(known)) == pytest.approx((low, high), abs=0.006)


def test_parts_of_measured_rows_add_up() -> None:
    for one in measured_rows():
        if one.compute and not one.note:
            assert one.compute + one.communication == pytest.approx(one.seconds, abs=2)


def test_accuracy_and_ranking_by_hand() -> None:
    fast, slow, even = row(Method.DATA, 10.0), row(Method.FILTER, 40.0), row(Method.CHANNEL, 50.0)
    checks = (
        RowCheck(fast, {"paradl": 12.0, "galvatron": 30.0, "published": None}),
        RowCheck(slow, {"paradl": 20.0, "galvatron": 20.0, "published": None}),
        RowCheck(even, {"paradl": 20.0, "galvatron": None, "published": None}),
    )
    assert [one.accuracy("paradl") for one in checks] == pytest.approx([0.8, 0.5, 0.4])
    assert mean_accuracy(checks, "galvatron") == pytest.approx((-1 + 0.5) / 2)
    assert mean_accuracy(checks, "published") is None
    (found,) = rankings(checks)
    assert found.measured == ("data", "filter", "channel")
    assert found.right == {"paradl": True, "galvatron": False, "published": False}
    assert [score.rows for score in scores(checks, lambda one: one.model)] == [3]


def test_iterations_are_ranked_by_their_epochs() -> None:
    """An iteration of data parallelism has more samples."""
    data = row(Method.DATA, 0.2, devices=4, per="iteration")  # 5,000 of them: 1,000 s
    inner = row(Method.DATA_SPATIAL, 0.1, devices=4, per="iteration")  # 20,000 of them: 2,000 s
    checks = [RowCheck(one, {"paradl": 1.0, "galvatron": None, "published": None}) for one in (data, inner)]
    assert rankings(checks)[0].measured == ("data", "data+spatial")


def test_rows_are_predicted_by_both_kinds_of_formulas() -> None:
    wanted = [one for one in measured_rows() if one.model == "vgg16" and one.strategy in (Method.SERIAL, Method.DATA)]
    checks = check_rows(wanted)
    assert all((one.predicted[way] or 0) > 0 for one in checks for way in ("paradl", "galvatron"))
    alone = next(one for one in checks if one.row.strategy is Method.SERIAL)
    assert (alone.accuracy("paradl") or 0) > 0.99  # its seconds are this measurement
    assert (alone.accuracy("galvatron") or 0) > 0.8


REACHED = {
    "serial": 0.94, "data": 0.87, "data+spatial": 0.42, "data+filter": 0.72, "filter": 0.43, "channel": 0.33,
}  # fmt: skip
"""What the default formulas reach of the rows of report and logs; docs/oracle-accuracy.md has the rows."""


def test_accuracy_by_strategy_stays() -> None:
    checks = check_rows(measured_rows())
    found = {score.name: score.accuracy["galvatron"] or 0.0 for score in scores(checks, lambda row: row.strategy.value)}
    assert found.keys() == REACHED.keys()
    assert {name: share for name, share in found.items() if share < REACHED[name]} == {}
    assert sum(one.right["galvatron"] for one in rankings(checks)) >= 20


RUN = {
    "family": "torchgpipe", "run_id": "mine", "framework": "torchgpipe", "model": "resnet50", "arch": "cnn",
    "gpu": "V100-SXM2-16GB", "gpus_per_node": 4, "n_gpus": 2, "dp": 1, "pp": 2, "pp_schedule": "gpipe",
    "micro_batch": 8, "global_batch": 64, "precision": "fp32", "optimizer": "sgd", "iter_time_s": 0.2, "quality": "A",
}  # fmt: skip


def test_errors_of_rows_and_their_means(tmp_path: Path) -> None:
    other = RUN | {"family": "elsewhere", "run_id": "not shown"}
    runs = tmp_path / "runs.jsonl"
    runs.write_text("\n".join(json.dumps(run) for run in (RUN, other)) + "\n")
    command = [sys.executable, "scripts/oracle_accuracy.py", "--runs", str(runs), "--rows", "--bounds"]
    told = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    ).stdout
    assert "pipeline, torchgpipe" in told
    assert "data+spatial, report" in told
    assert "97.6 %" in told
    assert "torchgpipe: mine: resnet50, 2 GPUs, fp32" in told
    assert "not shown" not in told
    # What any constants can reach is no less than what ours do, and ParaDL's two networks keep it far from all.
    bounds = re.findall(r"^\| (.+) \| \d+ \| ([\d.]+) % \| ([\d.]+) % \| one set", told, re.MULTILINE)
    assert {name: float(most) < 80 for name, _, most in bounds}["data+spatial, logs"]
    assert all(float(reached) <= float(most) for _, reached, most in bounds)


def test_the_tables_of_the_page_are_those_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script, page = importlib.import_module("oracle_accuracy"), text_of("docs/oracle-accuracy.md")
    rows = list(script.scored(ROOT / "profiles" / "published" / "runs.jsonl"))
    written = script.replaced(page, "accuracy", script.means_table(rows))
    written = script.replaced(written, "bounds", script.bounds_table(rows))
    assert written == page, "run scripts/oracle_accuracy --write"


def test_no_order_of_devices_beats_the_isotonic_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = importlib.import_module("oracle_accuracy")
    measured = [1.0, 0.5, 2.0, 1.6]
    group = [script.Scored("", "data", "", None, measured=each, devices=2**n) for n, each in enumerate(measured)]

    def lost(values: tuple[float, ...]) -> float:
        return sum(abs(value - each) / each for value, each in zip(values, measured, strict=True))

    grid = [step / 20 for step in range(8, 45)]
    best = min(map(lost, itertools.combinations_with_replacement(grid, 4)))
    assert sum(1 - each for each in script.ordered_bound(group)) == pytest.approx(best)
