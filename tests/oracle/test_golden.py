"""The closed forms against what the released oracle printed, and against the totals it printed of its inputs."""

import pytest

from galvatron_lite.oracle.closed_form import Case, estimate, largest_batch, quirks_named
from galvatron_lite.oracle.layers import ModelSplit, wires_of
from galvatron_lite.oracle.request import fabric_named, network_named
from galvatron_lite.oracle.rows import Method

from .printed import printed

ABCI = fabric_named("abci")
TOTALS = {  # inputs, outputs, weights, seconds a sample: systems.md 5.4, from the heads of the logs
    "resnet50": (14_971_596, 14_819_368, 22_734_016, 0.003119502),
    "vgg16": (15_705_164, 15_552_936, 169_801_408, 0.008245589),
    "alexnet": (931_692, 779_464, 62_367_776, 0.000610938),
    "cosmoflow-512": (3_528_104_656, 2_991_233_748, 2_128_064, 2.108143184),
    "cosmoflow-256": (464_228_736, 397_119_876, 2_128_064, 0.263517898),
}


def shown(value: float) -> str:
    """A float as Python 2 prints it: 12 significant digits."""
    return f"{value:.12g}"


@pytest.mark.parametrize("name", TOTALS)
def test_layers_sum_to_the_published_totals(name: str) -> None:
    found = network_named(name)
    assert (found.inputs, found.outputs, found.weights, found.seconds) == TOTALS[name]


@pytest.mark.parametrize(("name", "layers", "items"), [("resnet50", 49, 9_096_256), ("vgg16", 13, 13_939_200)])
def test_layers_that_filters_split(name: str, layers: int, items: int) -> None:
    split = network_named(name).split_by(ModelSplit.FILTER)
    assert (len(split), sum(layer.outputs for layer in split)) == (layers, items)


@pytest.mark.parametrize(
    ("name", "kind", "quirks", "samples"),
    [
        ("resnet50", Method.DATA, (), "66.3713327303"),
        ("vgg16", Method.DATA, (), "58.5511784785"),
        ("alexnet", Method.DATA, (), "1132.35276269"),
        ("cosmoflow-512", Method.DATA_SPATIAL, ("all",), "0.266622834017"),
        ("cosmoflow-256", Method.DATA_SPATIAL, ("all",), "2.10765393012"),
        ("vgg16", Method.DATA_SPATIAL, ("all",), "51.3001363286"),
    ],
)
def test_the_largest_batch_to_every_printed_digit(
    name: str, kind: Method, quirks: tuple[str, ...], samples: str
) -> None:
    """``maxSamplePerNode`` of the logs."""
    assert ABCI is not None
    case = Case(network_named(name), wires_of(ABCI), kind, 4, 1, quirks=quirks_named(quirks))
    assert shown(largest_batch(case)) == samples


def test_every_printed_digit() -> None:
    assert ABCI is not None
    for one in printed():
        for devices, figures in one.rows.items():
            found = estimate(one.case(network_named(one.model), ABCI, devices))
            computed = (found.compute, found.moved.total, found.memory)
            name = f"{one.model} {one.strategy.value} {one.batch} {devices}"
            assert list(map(shown, computed)) == list(map(shown, figures)), name
