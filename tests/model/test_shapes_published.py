"""Shipped shapes against published numbers: parameters exactly, FLOPs by the formulas of the literature."""

import pytest

from galvatron_lite.model.graph import ModelGraph, OperatorClass, Recompute
from galvatron_lite.model.shapes import load_model, load_shape, model_names
from tests.model.test_shapes_pictures import PARAMETERS as PICTURES

PARAMETERS = {
    "gpt2": 124_439_808,  # openai-community/gpt2
    "llama2-7b": 6_738_415_616,  # meta-llama/Llama-2-7b-hf
    "llama2-70b": 68_976_648_192,  # meta-llama/Llama-2-70b-hf
    "llama3-8b": 8_030_261_248,  # meta-llama/Meta-Llama-3-8B
    "llama3-70b": 70_553_706_496,  # meta-llama/Meta-Llama-3-70B
    "llama3-405b": 405_853_388_800,  # meta-llama/Llama-3.1-405B
    "mixtral-8x7b": 46_702_792_704,  # mistralai/Mixtral-8x7B-v0.1
    "deepseek-v3": 671_026_404_352,  # deepseek-ai/DeepSeek-V3 without the second token's module and score corrections
    "qwen3-235b-a22b": 235_093_634_560,  # Qwen/Qwen3-235B-A22B
    "gpt-oss-120b": 116_829_156_672,  # openai/gpt-oss-120b
    "bert-large": 336_226_108,  # BertForPreTraining of google-bert/bert-large-uncased
    "t5-3b": 2_851_598_336,  # google-t5/t5-3b
    "vit-huge": 632_045_800,  # torchvision vit_h_14, IMAGENET1K_SWAG_LINEAR_V1
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert load_model(name).parameters == PARAMETERS[name]


def test_gpt3_is_the_published_size_with_and_without_vocabulary_padding() -> None:
    layers, hidden = 96, 12288
    blocks = layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden
    bare = load_model("gpt3-175b", overrides={"vocab_multiple": 1}).parameters
    assert bare == blocks + (50257 + 2048) * hidden == 174_604_259_328
    assert load_model("gpt3-175b").parameters == blocks + (51200 + 2048) * hidden


def test_bert_masked_language_model_head() -> None:
    assert load_model("bert-large", overrides={"head": "masked_lm"}).parameters == 335_174_458  # BertForMaskedLM


def test_every_shipped_model_has_a_test_here() -> None:
    assert {*PARAMETERS, *PICTURES, "gpt3-175b"} == set(model_names())


def forward_flops(graph: ModelGraph, *classes: OperatorClass) -> int:
    return sum(
        operator.flops
        for layer in graph.layers
        for operator in graph.kind_of(layer).operators
        if operator.kind in classes
    )


@pytest.mark.parametrize("sequence", [512, 2048])
def test_gpt3_forward_flops_are_megatrons_formula(sequence: int) -> None:
    """Narayanan et al. 2021, section 5.1: 96 B s l h^2 (1 + s / 6h + V / 16lh) for 4 forward passes' worth."""
    graph = load_model("gpt3-175b", sequence=sequence)
    layers, hidden, vocab = 96, 12288, 51200
    blocks = 24 * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden))
    assert forward_flops(graph, OperatorClass.MATMUL, OperatorClass.ATTENTION) == pytest.approx(
        blocks + 2 * sequence * hidden * vocab, rel=1e-12
    )
    per_layer = 96 * sequence * hidden**2
    with_recompute = layers * per_layer * (1 + sequence / (6 * hidden) + vocab / (16 * layers * hidden))
    attention = sum(
        operator.backward_flops - 2 * operator.flops
        for layer in graph.layers
        for operator in graph.kind_of(layer).operators
        if operator.kind is OperatorClass.ATTENTION
    )
    again = sum(graph.kind_of(layer).flops for layer in graph.layers if layer.kind == "block")
    assert graph.flops + again - attention == pytest.approx(with_recompute, rel=1e-12)


@pytest.mark.parametrize("name", ["gpt2", "llama2-7b", "llama3-70b"])
def test_training_flops_are_six_times_parameters_and_attention(name: str) -> None:
    """6 x matmul parameters x tokens (Kaplan et al. 2020), and 14 x layers x width x tokens^2 for flash attention."""
    shape, graph = load_shape(name), load_model(name)
    layers, width = shape.layers, shape.heads * shape.head_dim  # type: ignore[union-attr]
    matrices = sum(
        operator.shape[1] * operator.shape[2] * operator.count
        for layer in graph.layers
        for operator in graph.kind_of(layer).operators
        if operator.kind is OperatorClass.MATMUL
    )
    attention = (4 + 10) * layers * width * graph.sequence**2
    assert graph.flops == 6 * matrices * graph.sequence + attention
    assert matrices == pytest.approx(graph.parameters, rel=0.06 if name != "gpt2" else 0.01)


def test_mixtral_computes_with_its_active_parameters_only() -> None:
    graph = load_model("mixtral-8x7b")
    active = 12_879_925_248  # Mixtral's 12.9B active parameters, token table and norms included
    weights = forward_flops(graph, OperatorClass.MATMUL) / (2 * graph.sequence)
    assert weights == active - 32000 * 4096 - (2 * 32 + 1) * 4096


def test_vit_huge_forward_flops_are_the_published_ones() -> None:
    """167.3 billion multiply-adds (torchvision, vit_h_14 at 224 pixels), which count attention's matmuls."""
    graph = load_model("vit-huge")
    classes = (OperatorClass.MATMUL, OperatorClass.ATTENTION, OperatorClass.CONVOLUTION)
    assert forward_flops(graph, *classes) / 2 == pytest.approx(167.3e9, rel=0.002)


def test_gpt3_block_under_tensor_parallelism_keeps_what_korthikanti_counts() -> None:
    """Equation 2 (10 + 24 / t) and, with sequence parallelism, equation 4 (34 / t)."""
    graph = load_model("gpt3-175b", overrides={"dropout": 0.1})
    tokens, hidden, heads, degree = 2048, 12288, 96, 8
    kept = graph.kinds["block"].kept[Recompute.NONE]
    sums, statistics = 4 * tokens * heads / degree, 16 * tokens
    assert kept.at(degree, False) == (10 + 24 / degree) * tokens * hidden + sums + statistics
    shared = 34 / degree * tokens * hidden + sums + statistics / degree
    assert kept.at(degree, True) == shared


def test_convnext_xl_forward_flops_are_the_published_ones() -> None:
    """60.9 billion multiply-adds (Liu et al. 2022, table 1)."""
    flops = forward_flops(load_model("convnext-xl"), OperatorClass.CONVOLUTION, OperatorClass.MATMUL)
    assert flops / 2 == pytest.approx(60.9e9, rel=0.002)


def test_resnet50_forward_flops_are_the_published_ones() -> None:
    """4.09 billion multiply-adds (torchvision)."""
    flops = forward_flops(load_model("resnet50"), OperatorClass.CONVOLUTION, OperatorClass.MATMUL)
    assert flops / 2 == pytest.approx(4.09e9, rel=0.001)


def test_gpt3_block_keeps_what_korthikanti_counts_without_attention_matrices() -> None:
    """Equation 1 less the attention matrices: 34 s b h bytes with dropout; what flash attention and the norms keep
    besides is one fp32 number a query and head, and four fp32 numbers a token.
    """
    graph = load_model("gpt3-175b", overrides={"dropout": 0.1})
    tokens, hidden, heads = 2048, 12288, 96
    kept = graph.kinds["block"].kept
    extra = 4 * tokens * heads + 4 * 4 * tokens
    assert kept[Recompute.NONE].total == 34 * tokens * hidden + extra
    assert kept[Recompute.FULL].total == 2 * tokens * hidden
