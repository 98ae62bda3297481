"""Fits give back the line that points were made from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.profiler.measure import fit_collectives, fit_line
from galvatron_lite.profiler.schema import CollectivePoint

SIZES = [4096 * 4**power for power in range(8)]
latencies = st.floats(1e-6, 1e-2)
bandwidths = st.floats(1e7, 1e12)


@given(latencies, bandwidths)
def test_recovers_a_line(latency: float, bandwidth: float) -> None:
    line = fit_line(SIZES, [latency + size / bandwidth for size in SIZES])
    for size in SIZES:
        assert line(size) == pytest.approx(latency + size / bandwidth, rel=1e-3)
    assert line.residual < 1e-3


@given(latencies, bandwidths, st.lists(st.floats(-0.05, 0.05), min_size=8, max_size=8))
def test_noise_moves_it_little(latency: float, bandwidth: float, noise: list[float]) -> None:
    exact = [latency + size / bandwidth for size in SIZES]
    line = fit_line(SIZES, [value * (1 + shift) for value, shift in zip(exact, noise, strict=True)])
    assert all(abs(line(size) / value - 1) < 0.2 for size, value in zip(SIZES, exact, strict=True))


@given(latencies, bandwidths, st.integers(2, 5))
def test_an_outlier_is_outvoted(latency: float, bandwidth: float, place: int) -> None:
    exact = [latency + size / bandwidth for size in SIZES]
    line = fit_line(SIZES, [value * (10 if index == place else 1) for index, value in enumerate(exact)])
    others = [abs(line(SIZES[i]) / exact[i] - 1) for i in range(8) if i != place]
    assert max(others) < 0.1


def test_figures_stay_physical() -> None:
    falling = fit_line([1.0, 2.0, 3.0], [3.0, 2.0, 1.0])
    assert falling.slope > 0
    assert falling.latency >= 0
    steep = fit_line([1e6, 2e6], [1e-6, 1.0])
    assert steep.latency == 0.0
    assert fit_line([1e6], [0.5])(2e6) == pytest.approx(1.0)


def test_one_fit_for_each_shape_of_group() -> None:
    def points(group: int, stride: int, bandwidth: float) -> list[CollectivePoint]:
        return [
            CollectivePoint(Collective.ALL_REDUCE, group, stride, 1, size, 1e-4 + size / bandwidth) for size in SIZES
        ]

    fits = fit_collectives([*points(2, 1, 1e9), *points(2, 2, 1e8)])
    assert [(fit.stride, round(fit.bandwidth / 1e8)) for fit in fits] == [(1, 10), (2, 1)]
    assert all(fit.latency == pytest.approx(1e-4, rel=1e-3) and fit.residual < 1e-3 for fit in fits)
