"""Mixtures of experts by name: published parameters, windows, routers, and how tokens are spread over experts."""

from __future__ import annotations

import pytest

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import OperatorClass
from galvatron_lite.model.shapes import MoeShape, build_graph, load_model, load_shape


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
