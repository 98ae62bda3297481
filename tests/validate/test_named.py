"""Public models by name: the parameters they are published with come out."""

import pytest

from galvatron_lite.model.shapes import build_graph
from galvatron_lite.stacks.catalog import match_stack
from galvatron_lite.validate.model import named_figures, shape_of

from .runs import gpt

MIXTURE = {"arch": "moe", "gated_mlp": True, "tied_embeddings": False, "seq_len": 64, "ffn_hidden": None,
           "framework": "NeMo AutoModel FSDP2", "tp": 1}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "billions"),
    [
        ({"model": "qwen3-235b-a22b", "layers": 94, "hidden": 4096, "heads": 64, "kv_heads": 4, "vocab": 151936,
          "n_experts": 128, "moe_topk": 8, "moe_ffn": 1536}, 235.1),
        ({"model": "qwen3-30b-a3b", "layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4, "vocab": 151936,
          "n_experts": 128, "moe_topk": 8, "moe_ffn": 768}, 30.5),
        ({"model": "gpt-oss-120b", "layers": 36, "hidden": 2880, "heads": 64, "kv_heads": 8, "vocab": 201088,
          "n_experts": 128, "moe_topk": 4, "moe_ffn": 2880}, 116.8),
        ({"model": "deepseek-v3", "arch": "moe-mla", "layers": 61, "hidden": 7168, "heads": 128, "kv_heads": None,
          "vocab": 129280, "n_experts": 256, "moe_topk": 8, "moe_ffn": 2048}, 671.0),
    ],
)  # fmt: skip
def test_parameters_are_those_of_the_public_model(changes: dict[str, object], billions: float) -> None:
    run = gpt(**(MIXTURE | changes))
    graph = build_graph(shape_of(run, match_stack(run.framework)))
    items = sum(graph.kind_of(layer).parameters.total for layer in graph.layers)
    assert items == pytest.approx(billions * 1e9, rel=0.002)


def test_other_names_say_nothing() -> None:
    assert named_figures("llama3-8b") == named_figures(None) == {}
