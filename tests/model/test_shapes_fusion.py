"""Normalisation, addition and ReLU in one kernel: bytes counted by hand."""

from galvatron_lite.model.graph import LayerKind, ModelGraph, OperatorClass
from galvatron_lite.model.shapes import load_model
from galvatron_lite.model.shapes.images.layout import fused_norms
from galvatron_lite.model.shapes.images.names import graph_of_name

ITEMS = 28 * 28
HALF = 2


def resnet() -> ModelGraph:
    graph = graph_of_name("resnet50", 224, "fp16")
    assert graph is not None
    return graph


def moved(kind: LayerKind) -> tuple[int, int]:
    memory = [one for one in kind.operators if one.kind is OperatorClass.MEMORY]
    return sum(one.moved for one in memory), sum(one.backward_moved for one in memory)


def test_a_bottleneck_reads_the_shortcut_and_no_more() -> None:
    """512 -> 128 -> 128 -> 512 channels on 28 x 28 pixels, the shape of ResNet-50's second stage."""
    graph = resnet()
    name = next(
        name
        for name, kind in graph.kinds.items()
        if [one.shape[:2] for one in kind.operators if one.kind is OperatorClass.CONVOLUTION]
        == [(512, 128), (128, 128), (128, 512)]
    )
    normed, shortcut = (128 + 128 + 512) * ITEMS * HALF, 512 * ITEMS * HALF
    forward, backward = moved(fused_norms(graph).kinds[name])
    # Three passes of each norm and the shortcut's; backward five, the sum of two gradients, the shortcut's own.
    assert forward == 3 * normed + shortcut
    assert backward == 5 * normed + 3 * shortcut + shortcut
    assert moved(graph.kinds[name]) == (5 * normed + 3 * shortcut, 8 * normed + 3 * shortcut)


def test_the_rest_is_left_alone() -> None:
    graph = resnet()
    fused = fused_norms(graph)
    for name, kind in graph.kinds.items():
        own = [one for one in fused.kinds[name].operators if one.kind is not OperatorClass.MEMORY]
        assert own == [one for one in kind.operators if one.kind is not OperatorClass.MEMORY]
        assert fused.kinds[name].kept == kind.kept


def test_networks_without_norms_stay_as_they_are() -> None:
    graph = load_model("vgg16", precision="fp32")
    assert fused_norms(graph) == graph
