"""Where strategies stop scaling: shares and thresholds by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from galvatron_lite.oracle.rows import (
    CAUSES,
    CommunicationSeconds,
    FindingKind,
    Forecast,
    ForecastRow,
    Limit,
    LongestCommunication,
    ScalingFinding,
    StrategyLine,
    findings,
)

GOOD = ForecastRow("any", 2, 64, 10, compute=100.0, memory=10.0, capacity=20.0)


def found(*rows: ForecastRow, alone: float = 0.0, limit: int | None = None) -> list[ScalingFinding]:
    line = StrategyLine("any", rows, Limit(limit, "so it is"), alone)
    return list(findings(Forecast("net", "here", "paradl", 640, "measured: by hand", (), (line,))))


def test_a_case_without_bottlenecks() -> None:
    assert found(GOOD, replace(GOOD, devices=4)) == []


@pytest.mark.parametrize(
    ("name", "sort", "changes", "share"),
    [
        ("gradient exchange", FindingKind.LIMITATION, {"moved": CommunicationSeconds(gradients=25.0)}, 0.2),
        ("layer-wise collectives", FindingKind.LIMITATION, {"moved": CommunicationSeconds(layers=100.0)}, 0.5),
        ("messages between neighbours", FindingKind.BOTTLENECK,
         {"moved": CommunicationSeconds(halo=10.0, messages=10.0, gather=5.0)}, 0.2),
        ("network congestion", FindingKind.BOTTLENECK,
         {"moved": CommunicationSeconds(gradients=10.0), "congested": 7.7}, 0.07),
        ("memory redundancy", FindingKind.BOTTLENECK, {"replicated": 6.0}, 0.6),
        ("weight update", FindingKind.LIMITATION, {"update": 25.0}, 0.2),
        ("workload balance", FindingKind.LIMITATION, {"imbalance": 1.25}, 0.2),
        ("computation redundancy", FindingKind.BOTTLENECK, {"duplicated": 0.3}, 0.3),
    ],
)  # fmt: skip
def test_each_bottleneck_is_named(name: str, sort: FindingKind, changes: dict[str, object], share: float) -> None:
    row = replace(GOOD, **changes)  # type: ignore[arg-type]
    (one,) = found(GOOD, replace(row, devices=8))
    assert (one.name, one.sort, one.devices) == (name, sort, 8)
    assert one.share == one.worst == pytest.approx(share)
    assert f"{share:.0%}" in one.words
    assert "from 8 GPUs" in one.words


def test_bottlenecks_are_beyond_thresholds_not_at_them() -> None:
    for cause in CAUSES:
        assert 0 < cause.threshold < 1
    below = replace(GOOD, moved=CommunicationSeconds(gradients=11.0))  # 9.9 % of the epoch
    assert found(below) == []


def test_the_worst_is_reported_with_its_layer() -> None:
    loud = LongestCommunication(gradients="fc6")
    rows = [
        replace(GOOD, devices=p, moved=CommunicationSeconds(gradients=s), longest=loud)
        for p, s in ((2, 1.0), (4, 25.0), (8, 100.0))
    ]
    (one,) = found(*rows)
    assert (one.devices, one.worst_devices) == (4, 8)
    assert one.words == "20% of the epoch from 4 GPUs, 50% on 8, most at fc6"


def test_work_that_does_not_split() -> None:
    even = replace(GOOD, compute=50.0, shared=2)
    assert found(even, alone=100.0) == []
    slow = replace(GOOD, devices=4, compute=50.0, shared=4)
    (one,) = found(even, slow, alone=100.0)
    assert (one.name, one.devices, one.share) == ("split work", 4, pytest.approx(0.5))
    assert "2.0 times what an even split would leave" in one.words


def test_memory_and_the_number_of_devices() -> None:
    tight = replace(GOOD, devices=1, memory=30.0)
    beyond = ForecastRow("any", 16, 64, 1, problem="beyond its limit of 8 GPUs")
    memory, devices = found(tight, GOOD, beyond, limit=8)
    assert (memory.name, memory.devices, memory.worst) == ("memory", 1, 1.5)
    assert "does not fit 20 B on 1 GPU: 30 B" in memory.words
    assert (devices.name, devices.devices) == ("number of devices", 16)
    assert devices.words == "8 GPUs at most: so it is"
