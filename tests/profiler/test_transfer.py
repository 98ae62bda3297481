"""Profiles carried to another device, held against estimates of that device, which know it."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from galvatron_lite.api import find_profile, plan
from galvatron_lite.calibration.schema import StackConstants
from galvatron_lite.calibration.store import constants_for_stack, load_calibration
from galvatron_lite.cli import app
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cluster.cluster import Cluster, Collective, RankGroup
from galvatron_lite.cluster.collectives import collective_seconds
from galvatron_lite.cost.communication import Links
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.shapes import DecoderShape, build_graph
from galvatron_lite.parallelism.base import Communication, Moment
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import CollectiveFit, Origin, OriginKind, Profile
from galvatron_lite.profiler.store import read_profile, write_profile
from galvatron_lite.profiler.transfer import SIZES, class_ratios, link_factors, machines, scale_up, transfer_profile
from galvatron_lite.stacks.catalog import GALVATRON

SHAPE = DecoderShape(name="small", layers=2, hidden=1024, heads=16, vocab=32000, seq_len=1024)
GRAPH = build_graph(SHAPE, precision="fp16")
SAMPLES = (1, 4, 16)


def profile_on(cluster: Cluster, **software: float) -> Profile:
    constants = replace(constants_for_stack(load_calibration(), GALVATRON.name), **software)  # type: ignore[arg-type]
    stack = replace(GALVATRON, constants=constants)
    return estimate_profile(GRAPH, cluster, precision="fp16", name="small", samples=SAMPLES, stack=stack)


@pytest.fixture(scope="module")
def here() -> Cluster:
    return load_cluster("v100", 2)


@pytest.fixture(scope="module")
def there() -> Cluster:
    return load_cluster("h100", 2)


def errors(one: Profile, other: Profile) -> list[float]:
    pairs = zip(one.layers, other.layers, strict=True)
    return [abs((a.forward + a.backward) / (b.forward + b.backward) - 1) for a, b in pairs]


def test_an_estimate_carried_over_is_the_estimate_there(here: Cluster, there: Cluster) -> None:
    carried, known = transfer_profile(profile_on(here), there), profile_on(there)
    assert max(errors(carried, known)) < 1e-3
    assert carried.optimizer.seconds_per_item == pytest.approx(known.optimizer.seconds_per_item)
    assert [point.kept for point in carried.layers] == [point.kept for point in known.layers]


def test_what_the_profile_tells_of_each_class_is_carried_over(here: Cluster, there: Cluster) -> None:
    """Software whose memory-bound kernels are slow: not the ratio of its whole layers is carried."""
    slow = {"memory": 2.0 * constants_for_stack(load_calibration(), GALVATRON.name).memory}
    known, plain = profile_on(there, **slow), (profile_on(here), profile_on(there))
    measured = profile_on(here, **slow)
    carried = transfer_profile(measured, there)
    by_layer = [
        replace(a, forward=a.forward * c.forward / b.forward, backward=a.backward * c.backward / b.backward)
        for a, b, c in zip(measured.layers, plain[0].layers, plain[1].layers, strict=True)
    ]
    mean, naive = (sum(errors(each, known)) for each in (carried, replace(measured, layers=tuple(by_layer))))
    assert mean < 0.5 * naive
    assert mean / len(known.layers) < 0.06


def test_devices_of_one_type_share_all_of_it() -> None:
    measured = profile_on(load_cluster("a100-80gb", 2))
    slower = replace(
        measured, layers=tuple(replace(p, forward=1.3 * p.forward, backward=1.3 * p.backward) for p in measured.layers)
    )
    again = transfer_profile(slower, load_cluster("a100-80gb", 2))
    assert max(errors(again, slower)) < 1e-9


def test_matmuls_gain_more_than_memory_bound_operators(here: Cluster, there: Cluster) -> None:
    ratios = {one.kind.value: one.ratio for one in class_ratios(profile_on(here), *machines(profile_on(here), there))}
    assert ratios["matmul"] < ratios["memory"] < 1


def test_profiles_that_cannot_be_transferred_are_refused(here: Cluster) -> None:
    bf16 = estimate_profile(
        build_graph(SHAPE, precision="bf16"), load_cluster("a100-80gb", 2), precision="bf16", name="bf16", samples=(1,)
    )
    with pytest.raises(InputError, match="bf16"):
        transfer_profile(bf16, here)
    with pytest.raises(InputError, match="several types"):
        transfer_profile(profile_on(here), load_cluster("a100-v100", 16))


def test_the_transfer_command(tmp_path: Path, here: Cluster) -> None:
    write_profile(profile_on(here), tmp_path / "p.yaml")
    for target, name in (("h100", "H100-SXM5-80GB"), ("RTX-4090", "RTX-4090")):
        words = ["profile", "transfer", str(tmp_path / "p.yaml"), "--to", target, "-o", str(tmp_path / "out.yaml")]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        assert "matmul" in done.output
        made = read_profile(tmp_path / "out.yaml")
        assert made.cluster.device.name == name
        assert made.cluster.devices == 2
        assert {point.recompute for point in made.layers} >= {Recompute.NONE, Recompute.FULL}


def test_factors_that_are_known_are_not_learnt(here: Cluster, there: Cluster) -> None:
    quick = StackConstants(matmul=1.2, memory=1.1, kernel_host=1e-6)
    carried = transfer_profile(profile_on(here), there, factors=quick)
    assert max(errors(carried, profile_on(there))) > 1e-3


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
    (factor,) = link_factors(measured_on(truth), big.levels)
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


def test_a_transferred_profile_is_planned_with(tmp_path: Path) -> None:
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
