"""What is said, written and drawn of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import pytest

from galvatron_lite.analysis.answers import Answer, answer_text, as_data, figure
from galvatron_lite.analysis.setting import Point, Points, collect
from galvatron_lite.analysis.sweeps import (
    Goal,
    Target,
    TrainingAmount,
    best_batch,
    cheapest,
    fewest_devices,
    pareto_front,
)
from galvatron_lite.errors import InfeasibleError
from galvatron_lite.plans.schema import Plan
from tests.analysis.cases import plan_at, small

SETTING = small(1)
ANSWERS: dict[str, Callable[[], Answer]] = {
    "best_batch": lambda: best_batch(SETTING, 24),
    "fewest_devices": lambda: fewest_devices(SETTING, Target(Goal.SAMPLES, 1.0), 8),
    "cheapest": lambda: cheapest(SETTING, TrainingAmount(tokens=1e9), 2.0, batch=8),
    "pareto_front": lambda: pareto_front(small(1, budget=200_000), 8),
}


@cache
def answered(name: str) -> Answer:
    return ANSWERS[name]()


@pytest.mark.parametrize("name", ANSWERS)
def test_every_row_has_every_column_and_json_every_point(name: str) -> None:
    answer = answered(name)
    text = answer_text(answer)
    assert {len(row) for row in text.rows} == {len(text.columns)}
    assert text.sentence.endswith(".")
    assert (text.chosen is None) == (name == "pareto_front")
    data = json.loads(json.dumps(as_data(answer), allow_nan=False))
    assert (data["question"], data["complete"]) == (name, True)
    planned = [point for point in data["points"] if "step_seconds" in point]
    assert planned
    assert all({"reason", "needs"} <= set(point) for point in data["points"] if point not in planned)
    if text.chosen is not None:
        assert data["answer"]["step_seconds"] == text.chosen.seconds
        assert data["answer"]["devices"] == data["plan"]["devices"] == text.chosen.devices


@pytest.mark.parametrize("name", ANSWERS)
def test_the_figure_is_svg_with_every_plan(name: str) -> None:
    answer = answered(name)
    tree = ElementTree.fromstring(figure(answer))
    assert tree.tag.endswith("svg")
    dots = [one for one in tree.iter() if one.tag.endswith("circle")]
    points = [cost.point for cost in answer.costs] if hasattr(answer, "costs") else answer.points
    assert len(dots) == sum(point.plan is not None for point in points)
    width, height = float(tree.get("width", 0)), float(tree.get("height", 0))
    for dot in dots:
        assert 0 < float(dot.get("cx", -1)) < width
        assert 0 < float(dot.get("cy", -1)) < height
    chosen = [dot for dot in dots if dot.get("class") == "c1"]
    assert len(chosen) == (0 if name == "pareto_front" else 1)


def test_what_was_interrupted_says_so() -> None:
    for answer in map(answered, ANSWERS):
        assert not any("Interrupted" in note for note in answer_text(answer).notes)
        assert any("Interrupted" in note for note in answer_text(replace(answer, complete=False)).notes)


def test_nothing_found_says_what_comes_nearest() -> None:
    answer = fewest_devices(SETTING, Target(Goal.STEP, 1e-12), 8)
    assert "No number of GPUs up to 4 takes at most" in answer_text(answer).sentence
    assert ElementTree.fromstring(figure(answer)).tag.endswith("svg")
    near = fewest_devices(SETTING, Target(Goal.TOKENS, answer_rate() * 8 * 1.0001), 8)
    assert near.answer is None
    assert "The nearest: " in answer_text(near).sentence or "compute alone" in answer_text(near).sentence
    late = cheapest(SETTING, TrainingAmount(tokens=1e9), 2.0, batch=8, deadline=1e-3)
    assert "the quickest" in answer_text(late).sentence


def answer_rate() -> float:
    """The most samples a second that any number of devices reaches."""
    return max(cost.point.rate for cost in answered("cheapest").costs)  # type: ignore[union-attr]


def test_a_sweep_without_any_plan_is_an_error_and_an_interrupt_keeps_the_points_so_far() -> None:
    with pytest.raises(InfeasibleError, match="why"):
        Points((Point(1, 1, 1, reason="first"), Point(2, 1, 1, reason="why"))).require_plan()
    Points().require_plan()

    def points(plan: Plan | None) -> Iterator[Point]:
        yield Point(1, 8, 100)
        yield Point(2, 8, 100, plan=plan)
        raise KeyboardInterrupt

    seen = collect(points(plan_at(small(0), 2, 8)))
    assert [point.devices for point in seen.points] == [1, 2]
    assert not seen.complete
    with pytest.raises(KeyboardInterrupt):
        collect(points(None))
