"""The errors that the pages show are those of the scores file, and that is what the shipped constants give."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import fields
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest

import galvatron_lite
from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.validate.results import ScoredRun, SkipError, macro, score_families
from galvatron_lite.validate.rows import PublishedRun

from .pages import ROOT, text_of


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """``scripts/docs_scores.py``, which writes the tables."""
    spec = importlib.util.spec_from_file_location("docs_scores", ROOT / "scripts" / "docs_scores.py")
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return dict(json.loads(text_of("profiles/published/scores.json")))


@pytest.fixture(scope="module")
def judged(script: ModuleType) -> list[ScoredRun]:
    """Every published run, priced with the shipped constants."""
    return list(script.judged())


def test_the_tables_are_those_of_the_scores_file(script: ModuleType, data: dict[str, Any]) -> None:
    for page, name, table in script.PAGES:
        text = page.read_text(encoding="utf-8")
        assert script.replaced(text, name, table(data)) == text, f"{page}: run scripts/docs_scores"


def test_figures_of_the_table_by_hand(script: ModuleType, data: dict[str, Any]) -> None:
    """One row and one mean, without the script's own code."""
    shipped = data["shipped"]
    line = next(row for row in text_of("docs/costs.md").splitlines() if row.startswith("| vtrain-single |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    one = shipped["vtrain-single"]
    assert cells[1:6] == ["720", "720", *(f"{one[name]:.1f}" for name in ("time_mape", "time_median", "time_bias"))]
    means = [scores["time_mape"] for scores in shipped.values() if scores["time_mape"] is not None]
    total = next(row for row in text_of("docs/costs.md").splitlines() if row.startswith("| **mean of all"))
    assert total.split("|")[4].strip() == f"{sum(means) / len(means):.1f}"
    # Vacant cells are where nothing is scored, not lost figures.
    folds = [data["families"]["vtrain-single"].get(way, {}) for way in ("without model", "without family")]
    known = [
        *(fold.get("time_mape") for fold in folds),
        *(one[name] for name in ("memory_mape", "group_spearman", "regret")),
    ]
    assert sum(not cell for cell in cells) == known.count(None)


@pytest.mark.study
def test_every_published_row_is_counted(judged: list[ScoredRun]) -> None:
    rows = len(text_of("profiles/published/runs.jsonl").splitlines())
    reasons = [one.outcome.reason for one in judged if isinstance(one.outcome, SkipError)]
    assert not [reason for reason in reasons if "internal error" in reason or "does not fit" in reason]
    assert sum(one.scored for one in judged) > 0.6 * len(judged)
    scores = score_families(judged)
    failed = sum(bool(one.run.oom) and not one.scored and not isinstance(one.outcome, SkipError) for one in judged)
    assert len(judged) == rows == sum(family.rows for family in scores.values())
    assert sum(family.scored + sum(family.skipped.values()) for family in scores.values()) + failed == rows


@pytest.mark.study
def test_the_scores_file_is_of_the_shipped_constants(judged: list[ScoredRun], data: dict[str, Any]) -> None:
    scores = score_families(judged)
    assert list(data["shipped"]) == list(scores)
    assert {name: one["rows"] for name, one in data["shipped"].items()} == {n: one.rows for n, one in scores.items()}
    told = [one["time_mape"] for one in data["shipped"].values() if one["time_mape"] is not None]
    found = macro(scores.values())["time_mape"]
    assert found is not None
    assert sum(told) / len(told) == pytest.approx(found, abs=0.5), "run scripts/docs_scores --refresh"


@pytest.mark.study
def test_the_error_stated_for_image_networks_is_that_of_their_runs(judged: list[ScoredRun]) -> None:
    """A mean over families of means over runs, without the script's own code."""
    errors: dict[str, list[float]] = {}
    for one in judged:
        if one.time is not None and one.run.image_size is not None and one.run.seq_len is None:
            errors.setdefault(one.run.family, []).append(abs(one.time - 1))
    found = fmean(fmean(each) for each in errors.values())
    assert load_calibration().expected_error["images"] == pytest.approx(found, abs=2e-3), (
        "scripts/docs_scores --refresh"
    )


def test_the_figure_is_of_these_runs() -> None:
    path = ROOT / "docs" / "predicted-vs-measured.svg"
    assert path.stat().st_size < 400_000
    root = ET.fromstring(path.read_text(encoding="utf-8"))
    words = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    shipped = json.loads(text_of("profiles/published/scores.json"))["shipped"]
    assert {f"{name} ({one['timed']})" for name, one in shipped.items() if one["timed"]} <= words
    assert {f"{one['time_median']:.1f} %" for one in shipped.values() if one["timed"]} <= words


PAGE = text_of("profiles/published/README.md")
RUNS = [json.loads(line) for line in text_of("profiles/published/runs.jsonl").splitlines()]
LAYERS = [json.loads(line) for line in text_of("profiles/published/layers.jsonl").splitlines()]


def test_the_counts_of_published_runs() -> None:
    words = " ".join(PAGE.split())
    assert f"holds {len(RUNS):,} runs in {len({run['family'] for run in RUNS})} families" in words
    assert f"holds {len(LAYERS)} timings" in words
    assert f"to {max(run.get('n_gpus', 0) for run in RUNS):,} (" in " ".join(text_of("README.md").split())


def test_every_field_of_the_rows_is_described_and_read_or_never_compared() -> None:
    present = set().union(*RUNS)
    assert {name for name in present | set().union(*LAYERS) if f"`{name}`" not in PAGE} == set()
    read = {item.name for item in fields(PublishedRun)}
    assert present - read == {"tflops_per_gpu", "tflops_kind", "mfu", "hfu"}


def test_every_row_says_where_it_comes_from_and_has_a_name_of_its_own() -> None:
    assert all(run["source"] for run in RUNS)
    assert max(Counter(run["run_id"] for run in RUNS).values()) == 1
    assert {run["quality"] for run in RUNS} == {"A", "A-mem", "B", "C"}


def test_families_that_are_named_exist() -> None:
    part = PAGE.split("## What to know of the families")[1].split("## Licences")[0]
    families = {run["family"] for run in RUNS}
    for name in re.findall(r"\b([a-z]+-(?:[a-z0-9*]+-?)+)(?=[ ,:])", part):
        known = [one for one in families if re.fullmatch(name.replace("*", ".*"), one) or one.endswith(name)]
        assert known or name in NO_FAMILY, name


NO_FAMILY = {"nvidia-smi", "third-party"}


def test_the_reference_has_every_public_name() -> None:
    spec = importlib.util.spec_from_file_location("docs_api", ROOT / "scripts" / "docs_api.py")
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    lines = set(script.page().splitlines())
    assert {f"### `galvatron_lite.{name}`" for name in galvatron_lite.__all__} <= lines
