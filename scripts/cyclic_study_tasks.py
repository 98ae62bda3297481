"""What ``scripts/cyclic_study`` trains: a ResNet on generated pictures, a GPT on the standard library's text."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from galvatron_lite.model.shapes import ResNetShape
from galvatron_lite.model.zoo.convnets import ResNet
from galvatron_lite.model.zoo.gpt import GPT, GPTConfig

Batch = dict[str, Tensor]
MICRO_BATCHES = 4  # workers and stages, N
CLASSES, SIDE, SMOOTH = 10, 24, 5
BYTES, CONTEXT, HIDDEN = 256, 32, 32
"""Vocabulary (bytes as they are), tokens of a sample, width of the GPT."""


@dataclass(frozen=True, slots=True)
class Task:
    """What to train and how it is judged."""

    name: str  # in tables and files
    figure: str  # what ``judge`` returns, with its unit
    make: Callable[[int], nn.Module]  # a fresh model from a seed; one block a stage
    batches: Callable[[int, int], list[Batch]]  # so many global batches from a seed, the same for every rule
    judge: Callable[[nn.Module], float]  # the figure of a trained model
    optimizer: Callable[..., torch.optim.Optimizer]  # of parameters and a learning rate ``lr``
    words: str  # the optimizer, for readers
    rates: tuple[float, ...]  # learning rates that are compared, the usual one first
    steps: int  # to train in full size
    samples: int  # of a global batch


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def smooth_fields(count: int, draw: torch.Generator) -> Tensor:
    """Random pictures (count, 3, side, side) without fine detail, of mean 0 and deviation 1 each."""
    coarse = torch.randn(count, 3, SMOOTH, SMOOTH, generator=draw)
    fields = nn.functional.interpolate(coarse, (SIDE, SIDE), mode="bicubic", align_corners=True)
    mean, deviation = fields.mean((1, 2, 3), keepdim=True), fields.std((1, 2, 3), keepdim=True)
    return (fields - mean) / deviation


@lru_cache(maxsize=1)
def templates() -> Tensor:
    """One smooth picture a class, (classes, 3, side, side)."""
    return smooth_fields(CLASSES, drawn(7))


def pictures(samples: int, seed: int) -> Batch:
    """Templates of random classes, shifted around, under another smooth picture and noise."""
    draw = drawn(seed)
    labels = torch.randint(0, CLASSES, (samples,), generator=draw)
    shifts = torch.randint(0, SIDE, (samples, 2), generator=draw)
    places = torch.arange(SIDE)
    rows, columns = ((places + shifts[:, side : side + 1]) % SIDE for side in (0, 1))
    clean = templates()[labels]
    shifted = clean[torch.arange(samples)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    noise = torch.randn(shifted.shape, generator=draw)
    return {"pictures": shifted + 0.8 * smooth_fields(samples, draw) + noise, "labels": labels}


def picture_batches(steps: int, seed: int, samples: int) -> list[Batch]:
    """Batches of pictures never seen before: (samples, 3, side, side)."""
    return [pictures(samples, 10_000 * (seed + 1) + step) for step in range(steps)]


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Percent of 2,000 test pictures that are told right."""
    test = pictures(2000, 3)
    model.eval()
    right = model(test["pictures"]).argmax(1) == test["labels"]
    model.train()
    return 100 * float(right.float().mean())


@lru_cache(maxsize=1)
def library() -> tuple[Tensor, Tensor]:
    """Bytes of the modules of Python's standard library, to train on and to judge by (every tenth file)."""
    paths = sorted(Path(os.__file__).parent.glob("*.py"))
    parts = tuple(
        b"".join(path.read_bytes() for number, path in enumerate(paths) if (number % 10 == 9) == held_out)
        for held_out in (False, True)
    )
    train, judged = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, judged


def windows(text: Tensor, starts: Sequence[int] | Tensor) -> Batch:
    """Samples of text, (starts, context), with the bytes one further on as labels."""
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()
    return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def text_batches(steps: int, seed: int, samples: int) -> list[Batch]:
    """Batches of random windows of the text."""
    text, draw = library()[0], drawn(seed)
    every = torch.randint(0, len(text) - CONTEXT - 1, (steps, samples), generator=draw)
    return [windows(text, starts) for starts in every]


@torch.no_grad()
def bits_per_byte(model: nn.Module) -> float:
    """Of 1,000 windows of the files that were held out."""
    text = library()[1]
    starts = torch.linspace(0, len(text) - CONTEXT - 2, 1000).long()
    model.eval()
    loss = float(model(**windows(text, starts)))
    model.train()
    return loss / math.log(2)


def make_resnet(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return ResNet(ResNetShape(depths=(1, 1, 1, 1), width=8, expansion=2, image_size=SIDE, classes=CLASSES))


def make_gpt(seed: int) -> nn.Module:
    """A GPT whose head has weights of its own: tied ones would belong to the first and to the last stage."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab=BYTES, layers=MICRO_BATCHES, hidden=HIDDEN, heads=2, sequence=CONTEXT))
    model.head = nn.Linear(HIDDEN, BYTES, bias=False)
    nn.init.normal_(model.head.weight, std=0.02)
    return model


def tasks() -> tuple[Task, ...]:
    """Both."""
    return (
        Task(
            "ResNet", "test accuracy, %", make_resnet, partial(picture_batches, samples=64), accuracy,
            partial(torch.optim.SGD, momentum=0.9, weight_decay=5e-4), "SGD, momentum 0.9", (0.05, 0.0125), 200, 64,
        ),
        Task(
            "GPT", "validation bits per byte", make_gpt, partial(text_batches, samples=32), bits_per_byte,
            partial(torch.optim.AdamW, weight_decay=0.1), "AdamW", (4e-3, 1e-3), 300, 32,
        ),
    )  # fmt: skip
