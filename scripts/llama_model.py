"""Four Llama layers for one device: of the 8B size on a GPU, small where there is none."""

from __future__ import annotations

import torch
from torch import Tensor

from galvatron_lite.model.example import example_batch
from galvatron_lite.model.zoo.llama import Llama, LlamaConfig

BATCH = 8
SEED = 0
SMALL = LlamaConfig(vocab=512, layers=4, hidden=256, heads=8, kv_heads=4, ffn_hidden=768, sequence=256)
LARGE = LlamaConfig(vocab=32000, layers=4, hidden=4096, heads=32, kv_heads=8, ffn_hidden=14336, sequence=4096)


def make() -> tuple[Llama, dict[str, Tensor]]:
    """The model and a batch, for ``galvatron profile scripts/llama_model.py:make``."""
    torch.manual_seed(SEED)
    model = Llama(LARGE if torch.cuda.is_available() else SMALL)
    return model, example_batch(model, BATCH)
