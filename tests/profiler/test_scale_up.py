"""Profiles of few devices on clusters of many, held against the cluster that made their measurements."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from galvatron_lite.api import find_profile, plan
from galvatron_lite.cli import app
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cluster.cluster import Cluster, Collective, RankGroup
from galvatron_lite.cluster.collectives import collective_seconds
from galvatron_lite.cost.communication import Links
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.profiler.schema import CollectiveFit, Origin, OriginKind, Profile
from galvatron_lite.profiler.store import write_profile
from galvatron_lite.profiler.transfer import SIZES, factors_of, scale_up

KINDS = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.SEND_RECV)


def slower(cluster: Cluster, bandwidth: float, latency: float) -> Cluster:
    levels = [
        replace(one, bandwidth=bandwidth * one.bandwidth, latency=latency * one.latency, start=latency * one.start)
        for one in cluster.levels
    ]
    return replace(cluster, levels=tuple(levels))


def measured_on(cluster: Cluster) -> Profile:
    """A profile whose collectives are straight lines through two sizes of the cluster's law."""
    fits = []
    groups = [RankGroup(size) for size in (2, 4, 8, 16) if size <= cluster.devices]
    if cluster.devices > 8:
        groups.append(RankGroup(2, 8, 8))
    for kind in KINDS:
        for group in groups:
            small, large = (collective_seconds(cluster, kind, size, group) for size in SIZES[::2])
            slope = (large - small) / (SIZES[2] - SIZES[0])
            latency = max(small - SIZES[0] * slope, 0.0)
            fits.append(CollectiveFit(kind, group.size, group.stride, group.siblings, latency, 1 / slope, 0.01))
    profile = find_profile(model="gpt2", cluster="h100", gpus=8)
    here = Origin(OriginKind.MEASURED, "H100, nccl, 8 processes", "2026-11-24", 5)
    return replace(profile, cluster=cluster, fits=tuple(fits), communication_origin=here, origin=here, straggling=0.0)


def seconds(profile: Profile, group: RankGroup, size: int = 2**24) -> float:
    return Links(profile).seconds(Communication(Collective.ALL_REDUCE, size, group, Moment.FORWARD, False))


@pytest.mark.parametrize(("bandwidth", "latency"), [(1.0, 1.0), (0.6, 2.0), (1.2, 0.7)])
def test_what_was_measured_of_a_node_is_carried_to_all_nodes(bandwidth: float, latency: float) -> None:
    truth = slower(load_cluster("h100", 8), bandwidth, latency)
    big = load_cluster("h100", 1024)
    (factor,) = factors_of(measured_on(truth), big.levels)
    assert factor.bandwidth == pytest.approx(bandwidth, rel=0.15)
    made = scale_up(measured_on(truth), big)
    assert made.cluster.devices == 1024
    assert made.cluster.levels[1] == big.levels[1]
    for size in (2, 8):
        assert seconds(made, RankGroup(size)) == pytest.approx(
            collective_seconds(truth, Collective.ALL_REDUCE, 2**24, RankGroup(size)), rel=0.15
        )


def test_two_nodes_tell_the_network_and_groups_beyond_follow_the_law() -> None:
    big = load_cluster("h100", 1024)
    truth = slower(big, 0.6, 1.5)
    made = scale_up(measured_on(slower(load_cluster("h100", 16), 0.6, 1.5)), big)
    plain = replace(measured_on(big), fits=())
    for group in (RankGroup(128, 8, 8), RankGroup(1024)):
        known = collective_seconds(truth, Collective.ALL_REDUCE, 2**28, group)
        assert seconds(made, group, 2**28) == pytest.approx(known, rel=0.15)
        assert seconds(plain, group, 2**28) < 0.75 * known


def test_every_figure_says_which_part_is_which() -> None:
    made = scale_up(measured_on(load_cluster("h100", 8)), load_cluster("h100", 1024))
    said = made.communication_origin.source
    assert "node as measured on 8 devices" in said
    assert "cluster by its sheet" in said
    assert "stragglers 0." in said
    assert made.origin.kind is OriginKind.MEASURED
    assert made.communication_origin.kind is OriginKind.ESTIMATED
    assert made.straggling > 0
    assert made.layers == measured_on(load_cluster("h100", 8)).layers


def test_links_of_another_kind_and_devices_of_another_type_keep_the_sheet() -> None:
    big = load_cluster("h100", 64)
    pcie = scale_up(measured_on(slower(load_cluster("h100", 8), 0.1, 1.0)), big)
    assert "another kind" in pcie.communication_origin.source
    assert pcie.cluster.levels == big.levels
    other = scale_up(measured_on(load_cluster("h100", 8)), load_cluster("a100-80gb", 64))
    assert "another type" in other.communication_origin.source
    assert not other.fits


def test_measured_groups_are_kept_where_nodes_are_as_large() -> None:
    profile = measured_on(load_cluster("h100", 16))
    made = scale_up(profile, load_cluster("h100", 64))
    assert {(fit.group, fit.stride) for fit in made.fits} == {(2, 1), (4, 1), (8, 1)}
    halves = load_cluster("h100", 64)
    halves = replace(halves, levels=(replace(halves.levels[0], size=4), replace(halves.levels[1], size=16)))
    assert not scale_up(profile, halves).fits


def test_plan_in_one_go(tmp_path: Path) -> None:
    write_profile(measured_on(load_cluster("h100", 8)), tmp_path / "p.yaml")
    words = ["plan", "--profile", str(tmp_path / "p.yaml"), "--cluster", "h100", "--gpus", "1024"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "on 1024 devices" in done.output
    assert "communication node as measured on 8 devices" in done.output


def test_an_estimated_profile_stays_what_it_was() -> None:
    known = find_profile(model="gpt2", cluster="h100", gpus=8)
    moved = scale_up(known, load_cluster("h100", 64))
    again = find_profile(model="gpt2", cluster="h100", gpus=64)
    assert moved.communication_origin == again.communication_origin
    assert plan(moved, batch=64).prediction == plan(again, batch=64).prediction
