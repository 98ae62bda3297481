"""scripts/published_plans and scripts/planning_time on a few searches."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.validate.predict import Predictor
from galvatron_lite.validate.rows import read_runs

ROOT = Path(__file__).parents[2]


def printed(script: str, *arguments: str) -> dict[str, Any]:
    """The JSON that a script prints."""
    command = [sys.executable, f"scripts/{script}.py", "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import published_plans

    return published_plans


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import planning_time

    return planning_time


@pytest.mark.study
def test_our_plans_are_no_slower_than_published_ones() -> None:
    found = printed("published_plans", "--families", "vtrain-single", "korthikanti2022", "--most", "2")
    cases = found["cases"]
    assert [case["family"] for case in cases] == ["vtrain-single"] * 2 + ["korthikanti2022"] * 2
    assert all(case["ours"] <= case["published"] * (1 + 1e-9) for case in cases)
    assert all(case["ratio"] == case["ours"] / case["published"] for case in cases)
    assert found["summary"][0].startswith("4 cases of ")
    # The quickest published plan of a case, at the very price that ``galvatron validate`` gives it.
    calibration = load_calibration()
    for run in read_runs(ROOT / "profiles" / "published" / "runs.jsonl"):
        named = [case for case in cases if case["case"] == run.run_id]
        for case in named:
            outcome = Predictor(calibration).predict(run)
            assert getattr(outcome, "step_seconds", None) == pytest.approx(case["published"], rel=1e-12)
            assert case["budget"] >= getattr(outcome, "device_memory", 0)


def test_a_published_plan_is_where_a_search_begins_that_ends_with_a_slower_one(
    plans: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration = load_calibration()
    case = next(iter(plans.spread(plans.cases_of(["korthikanti2022"], calibration), 1)))
    find_plan = plans.find_plan

    def poor(*arguments: Any, candidates: Any, **options: Any) -> Any:
        one = {"fixed": plans.Fixed(pipeline=1, forbidden=("tensor",)), "budget": 2**50}
        return find_plan(*arguments, candidates=candidates, **(options if candidates else options | one))

    honest = plans.compare(case, calibration, plans.options([]))
    assert not honest.given
    assert honest.ratio <= 1
    monkeypatch.setattr(plans, "find_plan", poor)
    helped = plans.compare(case, calibration, plans.options([]))
    assert helped.given
    assert helped.alone > 1
    assert helped.ratio <= 1


@pytest.mark.study
def test_cases_are_spread_over_a_family(plans: ModuleType) -> None:
    cases = plans.cases_of(["vtrain-single"], load_calibration())
    chosen = list(plans.spread(cases, 5))
    assert len(chosen) == 5
    assert chosen[0] is cases[0]
    assert list(plans.spread(cases, 10**6)) == cases
    assert len({one.run.run_id for case in cases for one in case}) == sum(map(len, cases))


@pytest.mark.study
def test_times_and_their_figure(tmp_path: Path) -> None:
    path = tmp_path / "figure.svg"
    found = printed("planning_time", "--only", "layers, galvatron", "--most", "16", "--plot", str(path))
    assert [search["size"] for search in found["searches"]] == [8, 16, 10]
    assert all(search["cpu"] > 0 and search["step"] > 0 and search["memory"] >= 0 for search in found["searches"])
    root = ET.fromstring(path.read_text(encoding="utf-8"))
    words = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"equal layers, galvatron", "unlike layers, galvatron", "layers", "16"} <= words


@pytest.mark.study
def test_a_target_is_kept_or_missed() -> None:
    found = printed("planning_time", "--only", "targets, galvatron", "--most", "8")
    (search,) = found["searches"]
    assert (search["model"], search["gpus"], search["batch"], search["target"]) == ("llama2-7b", 8, 64, 0.2)
    assert search["proven"]
    assert found["summary"][0].startswith("kept" if search["cpu"] <= 0.2 else "MISSED")


def test_growth_is_the_exponent_of_a_power(times: ModuleType) -> None:
    assert times.exponent([(size, 3 * size**0.7) for size in (2, 8, 50)]) == pytest.approx(0.7)
    assert times.exponent([(4, 1.0)]) == 0.0


def test_no_two_layers_of_the_pyramid_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import planning_time_questions

    graph = planning_time_questions.pyramid(300)
    assert len(graph.layers) == len(graph.kinds) == 300
    widths = [graph.kind_of(layer).dims.out_channels for layer in graph.layers[1:-1]]
    assert widths == sorted(set(widths))
    assert sorted({graph.kind_of(layer).dims.height for layer in graph.layers[1:-1]}) == [7, 14, 28, 56]
