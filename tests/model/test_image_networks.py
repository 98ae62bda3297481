"""Image networks built from their names against published parameters, multiply-adds and activations."""

from __future__ import annotations

from itertools import pairwise

import pytest

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, ModelGraph, OperatorClass
from galvatron_lite.model.shapes.images.layout import channels_last, fused_norms
from galvatron_lite.model.shapes.images.names import canonical, graph_of_name, works_on_tokens
from galvatron_lite.model.shapes.images.summary import ImageTotals, summary_graph

# Name, pixels a side, million parameters, multiply-adds in 10^9, million activations, as printed in
# github.com/huggingface/pytorch-image-models, results/benchmark-infer-amp-nchw-pt112-cu113-rtx3090.csv.
PUBLISHED = [
    ("mobilenetv3_small_050", 224, 1.59, 0.03, 0.92),
    ("mobilenetv2_050", 224, 1.97, 0.1, 3.64),
    ("tf_mobilenetv3_large_minimal_100", 224, 3.92, 0.22, 4.4),
    ("mnasnet_075", 224, 3.17, 0.23, 4.77),
    ("mnasnet_a1", 224, 3.89, 0.32, 6.23),
    ("resnet18", 224, 11.69, 1.82, 2.48),
    ("resnet26d", 224, 16.01, 2.6, 8.15),
    ("resnet50", 224, 25.56, 4.11, 11.11),
    ("swsl_resnext101_32x16d", 224, 194.03, 36.27, 51.18),
    ("semnasnet_140", 224, 6.11, 0.6, 8.87),
    ("regnetx_032", 224, 15.3, 3.2, 11.37),
    ("tf_efficientnet_lite0", 224, 4.65, 0.4, 6.74),
    ("efficientnet_em", 240, 6.9, 3.04, 14.34),
    ("legacy_seresnet34", 224, 21.96, 3.67, 3.74),
    ("legacy_seresnext26_32x4d", 224, 16.79, 2.49, 9.39),
    ("ecaresnext26t_32x4d", 224, 15.41, 2.7, 10.09),
    ("vgg16", 224, 138.36, 15.47, 13.56),
    ("resnetblur50d", 224, 25.58, 5.4, 12.82),
    ("seresnetaa50d", 224, 28.11, 5.4, 12.46),
    ("wide_resnet101_2", 224, 126.89, 22.8, 21.23),
    ("regnety_320", 224, 145.05, 32.34, 30.26),
    ("seresnet269d", 256, 113.67, 26.59, 53.6),
    ("xcit_nano_12_p8_224", 224, 3.05, 2.16, 15.71),
    ("xcit_small_24_p16_224", 224, 47.67, 9.10, 23.64),
    ("mnasnet_small", 224, 2.03, 0.07, 2.16),
    ("cs3darknet_s", 256, 3.28, 0.72, 2.97),
    ("cs3darknet_focus_x", 256, 35.02, 8.03, 10.69),
    ("tinynet_b", 188, 3.73, 0.21, 4.44),
    ("spnasnet_100", 224, 4.42, 0.35, 6.03),
    ("fbnetc_100", 224, 5.57, 0.4, 6.51),
    ("resnetv2_50t", 224, 25.57, 4.32, 11.82),
    ("resnetv2_50x1_bit_distilled", 224, 25.55, 4.23, 11.11),
    ("resnetv2_152d", 224, 60.2, 11.8, 23.36),
    ("nf_ecaresnet50", 224, 25.56, 4.21, 11.13),
    ("nf_seresnet101", 224, 49.33, 8.02, 16.27),
    ("densenet264", 224, 72.69, 12.95, 12.8),
    ("resnest14d", 224, 10.61, 2.76, 7.33),
    ("resnest50d_4s2x40d", 224, 30.42, 4.4, 17.94),
    ("resnest101e", 256, 48.28, 13.38, 28.66),
    ("repvgg_a2", 224, 28.21, 5.7, 6.26),
    ("tf_mixnet_s", 224, 4.13, 0.25, 6.25),
    ("mixnet_m", 224, 5.01, 0.36, 8.19),
    ("mixnet_xxl", 224, 23.96, 2.04, 23.43),
]


def graph_of(name: str, side: int = 224) -> ModelGraph:
    graph = graph_of_name(name, side, "fp16")
    assert graph is not None
    return graph


def totals(graph: ModelGraph) -> tuple[float, float, float]:
    """Multiply-adds, those counted for normalisation in the published figures, activations."""
    macs = norms = outputs = 0.0
    for layer in graph.layers:
        for operator in graph.kind_of(layer).operators:
            macs += operator.flops / 2
            if operator.name.startswith("norm"):
                norms += 2 * operator.shape[0]
            if operator.kind is OperatorClass.CONVOLUTION:
                inner, _, groups, _, _, kernel, other = operator.shape[:7]
                outputs += operator.flops / (2 * inner // groups * kernel * other)
            if operator.kind is OperatorClass.MATMUL:
                outputs += operator.shape[0] * operator.shape[2]
    return macs, norms, outputs


@pytest.mark.parametrize(("name", "side", "parameters", "macs", "activations"), PUBLISHED)
def test_a_network_has_its_published_size(
    name: str, side: int, parameters: float, macs: float, activations: float
) -> None:
    graph = graph_of(name, side)
    counted, norms, outputs = totals(graph)
    assert graph.parameters / 1e6 == pytest.approx(parameters, rel=0.005)
    # Some figures count normalisation (two a value) or the standardising of weights, some do not.
    weights = 2 * graph.parameters
    assert counted / 1e9 <= macs * 1.02 + 0.006
    assert (counted + norms + weights) / 1e9 >= macs * 0.98 - 0.006
    assert outputs / 1e6 == pytest.approx(activations, rel=0.02, abs=0.02)


def test_networks_without_published_activations_have_their_published_parameters() -> None:
    # Of a ConvMixer the published multiply-adds leave the depthwise convolutions out; the others have none published.
    for name, millions in (
        ("convmixer_768_32", 21.11), ("convmixer_1536_20", 51.63), ("nfnet_f7", 499.5), ("cs3sedarknet_l", 21.91),
        ("cs3se_edgenet_x", 50.72), ("darknetaa53", 36.02), ("efficientnetv2_rw_t", 13.65),
        ("efficientnetv2_rw_s", 23.94),
    ):  # fmt: skip
        assert graph_of(name).parameters / 1e6 == pytest.approx(millions, rel=0.001)
    for name, millions in (("nf_regnet_b0", 8.76), ("eca_nfnet_l0", 24.14)):
        assert graph_of(name).parameters / 1e6 == pytest.approx(millions, rel=0.002)


def test_the_convnext_and_vit_shapes_have_their_published_parameters() -> None:
    for name, millions in (("convnext_tiny", 28.59), ("convnext_base", 88.59), ("vit_base_patch16_224", 86.57)):
        assert graph_of(name).parameters / 1e6 == pytest.approx(millions, rel=0.005)


def test_names_of_training_recipes_mean_the_same_network() -> None:
    for names in (
        ("resnet50", "gluon_resnet50_v1b", "ssl_resnet50", "tv_resnet50", canonical("ResNet50v1.5")),
        ("tf_efficientnet_b3", "tf_efficientnet_b3_ns", "efficientnet_b3", canonical("EfficientNet-B3")),
        ("seresnext101_32x4d", canonical("SE-ResNeXt101-32x4d")),
    ):
        sizes = {(graph_of(name).parameters, graph_of(name).flops) for name in names}
        assert len(sizes) == 1


@pytest.mark.parametrize("name", ["", "resnet51", "unheard_of_net", "regnetx_999", "efficientnet_b11", "resnet50x"])
def test_a_name_that_no_rule_knows_has_no_graph(name: str) -> None:
    assert graph_of_name(name, 224, "fp16") is None


def test_networks_that_work_on_tokens_are_known() -> None:
    assert all(works_on_tokens(name) for name in ("xcit_nano_12_p8", "mixer_b16_224", "swin_tiny"))
    assert not any(works_on_tokens(name) for name in ("convmixer_768_32", "mobilevit_s", "dla34"))


def test_channels_last_turns_every_convolution_and_nothing_else() -> None:
    graph = graph_of("mobilenetv2_100")
    for name, kind in channels_last(graph).kinds.items():
        for before, after in zip(graph.kinds[name].operators, kind.operators, strict=True):
            assert after.channels_last == (after.kind is OperatorClass.CONVOLUTION)
            assert (before.shape, before.flops) == (after.shape, after.flops)


def test_a_summary_adds_up_to_its_totals() -> None:
    given = ImageTotals(macs=4.1e9, activations=11.1e6, parameters=25.6e6)
    graph = summary_graph(given, "fp16")
    convolutions = [
        operator
        for layer in graph.layers
        for operator in graph.kind_of(layer).operators
        if operator.kind is OperatorClass.CONVOLUTION
    ]
    assert sum(operator.flops for operator in convolutions) == pytest.approx(2 * 4.1e9, rel=0.001)
    assert sum(operator.moved for operator in convolutions) == pytest.approx(2 * 2 * 11.1e6, rel=0.01)
    assert graph.parameters == pytest.approx(25.6e6, rel=0.02)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("macs", ImageTotals(macs=0, activations=1e6, parameters=1e6)),
        ("activations", ImageTotals(macs=1e9, activations=-1, parameters=1e6)),
        ("parameters", ImageTotals(macs=1e9, activations=1e6, parameters=0)),
    ],
)
def test_a_summary_needs_its_totals(field: str, given: ImageTotals) -> None:
    with pytest.raises(InputError, match=field):
        summary_graph(given, "fp16")


def half_graph(name: str) -> ModelGraph:
    found = graph_of_name(canonical(name), 224, "fp16")
    assert found is not None
    return found


def items(name: str) -> int:
    made = half_graph(name)
    return sum(made.kind_of(layer).parameters.total for layer in made.layers)


def test_the_original_u_net_has_the_published_parameters() -> None:
    """31,030,658 of one input channel and two classes: convolutions of 3 x 3, 2 x 2 and 1 x 1 with biases."""
    widths = (1, 64, 128, 256, 512, 1024)
    down = sum(9 * (a * b + b * b) + 2 * b for a, b in pairwise(widths))
    up = sum(4 * 2 * w * w + w + 9 * (2 * w * w + w * w) + 2 * w for w in (512, 256, 128, 64))
    assert items("unet_medical") == down + up + 64 * 2 + 2 == 31_030_658


def test_nnu_net_s_volumes_have_thirty_one_million_parameters() -> None:
    assert items("nnunet-3d") == pytest.approx(31.2e6, rel=0.005)


def test_pictures_without_padding_end_at_388_pixels() -> None:
    """Figure 1 of the paper: 572 x 572 in, 388 x 388 out."""
    made = half_graph("unet_medical")
    last = made.kind_of(made.layers[-1])
    head = next(one for one in last.operators if one.kind is OperatorClass.CONVOLUTION)
    assert head.shape[:2] == (64, 2)
    assert head.flops == 2 * 64 * 2 * 388**2


@pytest.mark.parametrize(
    ("name", "sides", "levels"), [("nnunet-2d", 2, 5), ("nnunet-3d", 3, 5), ("unet_medical", 2, 4)]
)
def test_every_level_hands_its_picture_over(name: str, sides: int, levels: int) -> None:
    made = half_graph(name)
    skips = [one for one in made.tensors if one.readers[-1] != made.layers[_place(made, one.producer) + 1].name]
    assert len(skips) >= levels - 1
    extents = (made.kind_of(made.layers[1]).dims.depth, made.kind_of(made.layers[1]).dims.width)
    assert (min(extents) > 1) == (sides == 3)


def _place(made: ModelGraph, name: str) -> int:
    return next(place for place, layer in enumerate(made.layers) if layer.name == name)


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


def test_other_operators_are_not_changed() -> None:
    graph = resnet()
    fused = fused_norms(graph)
    for name, kind in graph.kinds.items():
        own = [one for one in fused.kinds[name].operators if one.kind is not OperatorClass.MEMORY]
        assert own == [one for one in kind.operators if one.kind is not OperatorClass.MEMORY]
        assert fused.kinds[name].kept == kind.kept
