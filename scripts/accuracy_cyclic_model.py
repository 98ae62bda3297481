"""A small Llama, whose head has a weight of its own: stages may be cut anywhere."""

from __future__ import annotations

import torch
from torch import Tensor

from galvatron_lite.model.zoo.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(vocab=256, layers=6, hidden=192, heads=6, kv_heads=6, ffn_hidden=512, sequence=96)
BATCH = 12


def make() -> tuple[Llama, dict[str, Tensor]]:
    """The model and an example batch, for ``galvatron profile scripts/accuracy_cyclic_model.py:make``."""
    torch.manual_seed(0)
    tokens = torch.randint(0, CONFIG.vocab, (BATCH, CONFIG.sequence + 1))
    return Llama(CONFIG), {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
