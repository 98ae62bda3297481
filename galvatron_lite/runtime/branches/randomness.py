"""A source of random numbers for each branch: what it draws must not move what the trunk draws next on some ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Stream:
    """The random states that a branch draws from.

    Args:
        seed: where they start.
        device: of this rank.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        outside = self._states()
        torch.manual_seed(seed)
        self._own = self._states()
        self._set(outside)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Random numbers inside are the branch's."""
        outside = self._states()
        self._set(self._own)
        try:
            yield
        finally:
            self._own = self._states()
            self._set(outside)

    def state(self) -> list[Tensor]:
        """Where it is."""
        return list(self._own)

    def set_state(self, state: list[Tensor]) -> None:
        """Go on from what ``state`` gave."""
        self._own = list(state)

    def _states(self) -> list[Tensor]:
        on_gpu = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *on_gpu]

    def _set(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.cuda.set_rng_state(state, self._device)
