"""Profiles carried to another device, held against estimates of that device, which know it."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from galvatron_lite.calibration.schema import StackConstants
from galvatron_lite.calibration.store import constants_for_stack, load_calibration
from galvatron_lite.cli import app
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cluster.cluster import Cluster
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.shapes import DecoderShape, build_graph
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import OriginKind, Profile
from galvatron_lite.profiler.store import read_profile, write_profile
from galvatron_lite.profiler.transfer import class_ratios, machines, transfer_profile
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


def test_what_is_said_of_where_figures_come_from(here: Cluster, there: Cluster) -> None:
    carried = transfer_profile(profile_on(here), there)
    assert carried.origin.kind is OriginKind.ESTIMATED
    assert "V100-SXM2" in carried.origin.source
    assert "carried to H100-SXM5-80GB" in carried.origin.source
    assert not carried.fits
    assert not carried.cluster.fingerprint


def test_matmuls_gain_more_than_memory_bound_operators(here: Cluster, there: Cluster) -> None:
    ratios = {one.kind.value: one.ratio for one in class_ratios(profile_on(here), *machines(profile_on(here), there))}
    assert ratios["matmul"] < ratios["memory"] < 1


def test_refused(here: Cluster) -> None:
    bf16 = estimate_profile(
        build_graph(SHAPE, precision="bf16"), load_cluster("a100-80gb", 2), precision="bf16", name="bf16", samples=(1,)
    )
    with pytest.raises(InputError, match="bf16"):
        transfer_profile(bf16, here)
    with pytest.raises(InputError, match="several types"):
        transfer_profile(profile_on(here), load_cluster("a100-v100", 16))


def test_command(tmp_path: Path, here: Cluster) -> None:
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
