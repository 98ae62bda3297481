"""Bytes on the wire: of single messages by hand, and of whole plans as priced."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.verify.conformance.layers import PlannedLayers
from galvatron_lite.verify.conformance.volume import predicted_bytes, volume, wire_bytes
from galvatron_lite.verify.schema import Message, MessageType, Verdict
from tests.verify.test_faithful import PLANS, graph, right_runs
from tests.verify.worlds import message


@cache
def profile() -> Profile:
    return estimate_profile(graph(), load_cluster("a100-80gb", 4), precision="fp32", name="gpt")


def of(kind: MessageType, bytes_given: int, **more: tuple[int, ...]) -> Message:
    return replace(message(kind, (0, 1, 2, 3), shape=(bytes_given,)), bytes=bytes_given, **more)


def test_wire_bytes_of_one_message() -> None:
    """By hand, four ranks and 400 bytes given by each."""
    assert wire_bytes(of(MessageType.ALL_REDUCE, 400), 0) == 600
    assert wire_bytes(of(MessageType.ALL_GATHER, 400), 0) == 1200
    assert wire_bytes(of(MessageType.REDUCE_SCATTER, 400), 0) == 300
    assert wire_bytes(of(MessageType.ALL_TO_ALL, 400), 0) == 300
    assert wire_bytes(of(MessageType.ALL_TO_ALL, 400, sent=(100,) * 4, taken=(10, 20, 30, 40)), 1) == 80
    assert wire_bytes(of(MessageType.SEND, 400), 0) == 400
    assert wire_bytes(replace(of(MessageType.RECEIVE, 400), bytes=0), 0) == 0


def test_what_is_priced_is_the_closed_form() -> None:
    """All gradients once a step in an all-reduce of two ranks; twice a boundary tensor for every micro-batch."""
    found = predicted_bytes(LayerPricer(profile()), PlannedLayers(PLANS["data"], graph()), 0)
    assert found["data"] == 4 * graph().parameters
    ends = predicted_bytes(LayerPricer(profile()), PlannedLayers(PLANS["pipeline"], graph()), 0)
    assert ends["pipeline"] == PLANS["pipeline"].microbatches * 2 * 16 * 32 * 4


@pytest.mark.parametrize("name", PLANS)
def test_what_is_sent_is_what_is_priced(name: str) -> None:
    check = volume(right_runs(PLANS[name]), PLANS[name], profile())
    assert check.verdict is Verdict.PASSED, (check.said, *check.details)
    assert check.details


def test_what_is_not_priced_is_found() -> None:
    """Gradients that are summed twice."""
    runs = right_runs(PLANS["data"])
    twice = [replace(run, messages=run.messages * 2) for run in runs]
    check = volume(twice, PLANS["data"], profile())
    assert check.verdict is Verdict.FAILED
    assert check.said.startswith("Stage 0 sends")
    assert any("for data" in line for line in check.details)
