"""The random numbers that a pass draws (dropout): decided by its stage and its micro-batch, not by what ran before it.

Ending what is in flight changes the order of the passes of a device that runs several stages, and another setting runs
them elsewhere. Neither changes what a pass draws.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

Draws = Callable[[int, int], AbstractContextManager[None]]
"""Of a stage, and the number of a micro-batch: the forward pass is run inside."""


def as_they_come(_stage: int, _number: int) -> AbstractContextManager[None]:
    """Passes draw from the process's generators, one after another."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class SeededDraws:
    """Every pass has a seed of its own; the process's generators go on afterwards as if nothing had been drawn.

    Recomputation draws the same again: ``torch.utils.checkpoint`` keeps the state that it began with.
    """

    seed: int  # of the run, the same on every process
    device: torch.device  # where passes run

    @contextmanager
    def __call__(self, stage: int, number: int) -> Iterator[None]:
        """Run a pass of a stage and a micro-batch inside."""
        own = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(own, device_type=self.device.type if own else "cuda"):
            chosen = _seed_of(self.seed, stage, number)
            torch.default_generator.manual_seed(chosen)
            if own:
                with torch.cuda.device(self.device):
                    torch.cuda.manual_seed(chosen)
            yield


def _seed_of(seed: int, stage: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{stage}:{number}".encode()).digest()[:7], "big")
