"""Shipped shapes against published numbers: parameters exactly, FLOPs by the formulas of the literature."""

from __future__ import annotations

import pytest

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import ModelGraph, OperatorClass
from galvatron_lite.model.shapes import MoeShape, build_graph, load_model, load_shape, model_names
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


@pytest.mark.parametrize(
    ("name", "active"),
    [
        # README_WEIGHTS.md of huggingface.co/deepseek-ai/DeepSeek-V3, of the main model.
        ("deepseek-v3", 36.7e9),
        # Model card of gpt-oss (arXiv:2508.10925), table 1; the table of embeddings does not count.
        ("gpt-oss-120b", 5.13e9),
        # Jiang et al. 2024 (arXiv:2401.04088): 12.9 billion with the table of embeddings (0.13).
        ("mixtral-8x7b", 12.77e9),
        # Qwen3's report (arXiv:2505.09388) says 22, which is 22.19 with the table of embeddings (0.62).
        ("qwen3-235b-a22b", 22.19e9 - 0.62e9),
    ],
)
def test_active_parameters_are_the_published_ones(name: str, active: float) -> None:
    assert load_model(name).active_parameters == pytest.approx(active, rel=0.01)


def test_every_second_block_sees_a_window() -> None:
    graph = load_model("gpt-oss-120b")
    assert [layer.kind for layer in graph.layers[1:5]] == ["windowed_block", "block"] * 2
    scores = {
        name: next(one for one in graph.kinds[name].operators if one.kind is OperatorClass.ATTENTION)
        for name in ("block", "windowed_block")
    }
    # every query sees 128 tokens in place of all 4,096, of which a fused kernel does half
    assert scores["windowed_block"].flops * 4096 == scores["block"].flops * 128
    assert (scores["block"].causal, scores["windowed_block"].causal) == (True, False)


def test_a_window_as_wide_as_the_sample_is_none() -> None:
    assert set(load_model("gpt-oss-120b", sequence=128).kinds) == {"before", "block", "after"}


def test_first_blocks_are_dense() -> None:
    graph = load_model("deepseek-v3")
    assert [layer.kind for layer in graph.layers[1:5]] == ["dense_block"] * 3 + ["block"]
    assert graph.kinds["block"].buffer_bytes == 4 * 256  # a score correction of every expert


@pytest.mark.parametrize("router", ["softmax", "chosen_softmax", "sigmoid"])
def test_a_router_keeps_scores_of_all_experts_unless_it_weighs_the_chosen_ones(router: str) -> None:
    sizes = {"layers": 1, "hidden": 64, "heads": 4, "vocab": 100, "seq_len": 16, "n_experts": 8, "gated_mlp": True}
    shape = MoeShape(**sizes, router=router)  # type: ignore[arg-type]
    names = [one.name for one in build_graph(shape).kinds["block"].operators]
    assert (f"router.{router}" in names) == (router != "chosen_softmax")


@pytest.mark.parametrize(
    ("field", "value"), [("expert_groups", 3), ("chosen_groups", 2), ("expert_excess", -0.1), ("expert_excess", 8.0)]
)
def test_sizes_that_do_not_fit_are_refused(field: str, value: float) -> None:
    sizes = {"layers": 1, "hidden": 64, "heads": 4, "vocab": 100, "seq_len": 16, "n_experts": 8}
    with pytest.raises(InputError, match=field if field != "chosen_groups" else "expert_groups"):
        build_graph(MoeShape(**sizes, **{field: value}))  # type: ignore[arg-type]


def test_mixtures_say_how_tokens_are_taken_to_be_spread() -> None:
    assert "72%" in load_model("mixtral-8x7b").notes[0]
    assert "evenly" in load_model("mixtral-8x7b", overrides={"expert_excess": 0}).notes[0]
    shape = load_shape("deepseek-v3")
    assert isinstance(shape, MoeShape)
    assert shape.expert_excess == 0.04
