"""What public models are that a run names but does not describe in full: figures of their ``config.json``."""

from __future__ import annotations

_NAMED: tuple[tuple[str, dict[str, int]], ...] = (
    # huggingface.co/Qwen/Qwen3-235B-A22B, Qwen3-30B-A3B and the dense ones: head_dim.
    ("qwen3-", {"head_dim": 128}),
    # huggingface.co/openai/gpt-oss-120b: head_dim.
    ("gpt-oss-", {"head_dim": 64}),
    # huggingface.co/deepseek-ai/DeepSeek-V3: n_shared_experts x moe_intermediate_size, first_k_dense_replace,
    # intermediate_size (of the dense layers).
    ("deepseek-v3", {"shared_ffn": 2048, "dense_layers": 3, "ffn_hidden": 18432}),
)


def named_figures(model: str | None) -> dict[str, int]:
    """Figures of a public model by its name, by field of a shape; none for a name that is not known."""
    name = (model or "").lower()
    return next((figures for start, figures in _NAMED if name.startswith(start)), {})
