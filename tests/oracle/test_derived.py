"""Tables of layers made from the planner's models."""

import pytest

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph, OperatorClass
from galvatron_lite.oracle.layers import ModelSplit, Network, Op, network_of
from galvatron_lite.oracle.request import graph_named, network_named, network_names


def table(graph: ModelGraph) -> Network:
    return network_of(graph, 1e-3, "by hand", 1000, 8)


@pytest.mark.parametrize("name", ["resnet50", "regnety_032"])
def test_flops_and_weights_are_those_of_the_model(name: str) -> None:
    graph = graph_named(name, "fp32")
    found = table(graph)
    convolutions = sum(
        one.flops
        for layer in graph.layers
        for one in graph.kind_of(layer).operators
        if one.kind is OperatorClass.CONVOLUTION
    )
    windows = [one for one in found.layers if one.op is Op.CONV and len(one.kernel) > 1]
    assert sum(one.forward_flops for one in windows) == convolutions
    # Norms and biases apart, every parameter is a weight of a layer.
    assert 0.97 * graph.parameters < found.weights <= graph.parameters
    assert sum(map(found.seconds_of, found.layers)) == pytest.approx(1e-3)


def test_the_made_table_is_near_the_published_one() -> None:
    """Pictures of 224 pixels for 226; the projections of He et al. 2015, which the published table leaves out."""
    made, published = table(graph_named("resnet50", "fp32")), network_named("resnet50")
    assert made.weights == pytest.approx(published.weights, rel=0.13)
    split = [sum(one.outputs for one in net.split_by(ModelSplit.FILTER)) for net in (made, published)]
    assert split[0] == pytest.approx(split[1], rel=0.25)
    assert made.outputs == pytest.approx(published.outputs, rel=0.25)


@pytest.mark.parametrize("name", network_names())
def test_every_published_table_has_a_model_of_the_planner(name: str) -> None:
    """Of the same network: pictures of 226 pixels, projections and biases apart."""
    published = network_named(name)
    graph = graph_named(published.graph, "fp32")
    assert graph.parameters == pytest.approx(published.weights, rel=0.25)
    assert len(graph.layers) <= len(published.layers)


def test_windows_are_split_where_there_are_pixels() -> None:
    found = table(graph_named("vgg16", "fp32"))
    assert {one.op for one in found.split_by(ModelSplit.SPATIAL)} == {Op.CONV, Op.POOL}
    assert all(ModelSplit.FILTER in one.split for one in found.layers if one.op is Op.CONV)
    assert not any(one.split for one in found.layers if one.op in (Op.FC, Op.RELU, Op.NORM))


def test_half_precision_has_small_items() -> None:
    assert table(graph_named("resnet50", "fp16")).item_bytes == 2


def test_transformers_have_no_such_table() -> None:
    with pytest.raises(InputError, match="closed forms are of convolutional networks"):
        table(graph_named("vit-huge", "fp32"))
