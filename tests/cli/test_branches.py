"""What ``galvatron profile`` says of branches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from galvatron_lite.cli.profile import best_gain, figures_of, print_branches, show_profile
from galvatron_lite.parallelism.branch.find import find_regions
from galvatron_lite.profiler.schema import Profile
from tests.branchy import plain_profile

SECONDS, ITEMS = (0.5, 0.25, 0.125), (100, 70, 30)


@pytest.fixture
def profile() -> Profile:
    return plain_profile(SECONDS, parameters=ITEMS)


def test_branches_take_what_their_layers_take(profile: Profile) -> None:
    (region,) = find_regions(profile.graph)
    found = list(figures_of(profile, region))
    assert [one.seconds for one in found] == [(time, 2 * time) for time in SECONDS]
    assert [one.parameters for one in found] == list(ITEMS)


def test_the_longest_decides(profile: Profile) -> None:
    (region,) = find_regions(profile.graph)
    assert best_gain(profile, region) == pytest.approx(sum(SECONDS) / max(SECONDS))


def test_unknown_figures_are_not_made_up(profile: Profile) -> None:
    some = replace(profile, layers=tuple(point for point in profile.layers if point.kind != "t1" or point.samples > 1))
    (region,) = find_regions(some.graph)
    assert [one.seconds is None for one in figures_of(some, region)] == [False, True, False]
    assert best_gain(some, region) == 0.0


def test_the_table(profile: Profile, capsys: pytest.CaptureFixture[str]) -> None:
    show_profile(profile, "here.yaml")
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if line.split()[:3] == ["t0", "1", "100"])
    assert row.split()[3:7] == ["500", "ms", "1", "s"]
    assert "Independent of one another: t0, t1, t2: at the same time at most 1.75x as fast" in printed


def test_a_chain_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    print_branches(Console(), replace(plain_profile(SECONDS), graph=replace(plain_profile(SECONDS).graph, tensors=())))
    assert not capsys.readouterr().out
