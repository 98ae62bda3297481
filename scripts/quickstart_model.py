"""The quickstart's model and data: a byte-level language model of the Python standard library's own sources."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from galvatron_lite.model.zoo.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab=256, layers=6, hidden=256, heads=8, sequence=128)
BATCH = 16
SEED = 0


def sources() -> Tensor:
    """All modules of the standard library's top folder, one after another, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(count: int, samples: int = BATCH, seed: int = SEED) -> Iterator[dict[str, Tensor]]:
    """Random stretches of the sources, the same on every rank; labels are the tokens one further on."""
    data = sources()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(0, len(data) - CONFIG.sequence - 1, (samples,), generator=generator)
        rows = torch.stack([data[start : start + CONFIG.sequence + 1] for start in starts]).long()
        yield {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def make() -> tuple[GPT, dict[str, Tensor]]:
    """The model and an example batch, for ``galvatron profile scripts/quickstart_model.py:make``."""
    torch.manual_seed(SEED)
    return GPT(CONFIG), next(batches(1))
