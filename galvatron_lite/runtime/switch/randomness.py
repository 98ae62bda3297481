"""Random states while the plan changes: a step draws what it would have drawn without the change."""

from __future__ import annotations

import random

import numpy
import torch

from galvatron_lite.runtime.alike import of_rank_zero


class RandomStates:
    """The states of the generators of torch, numpy and Python on this rank, as they are now.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numpy, self._python = numpy.random.get_state(), random.getstate()
        self._host = torch.get_rng_state()
        self._own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def share(self, needed: bool, device: torch.device) -> None:
        """Take rank 0's where ranks come to share samples, and must draw alike; all ranks call it."""
        if needed:
            self._host = of_rank_zero(self._host, device)
            self._own = None if self._own is None else of_rank_zero(self._own, device)

    def restore(self) -> None:
        """Draw from these states again."""
        numpy.random.set_state(self._numpy)
        random.setstate(self._python)
        torch.set_rng_state(self._host)
        if self._own is not None:
            torch.cuda.set_rng_state(self._own, self._device)
