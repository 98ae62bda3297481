"""What else goes on in a process is not taken for what a model does."""

from __future__ import annotations

import gc

import torch

from galvatron_lite.capture.trace import trace
from galvatron_lite.model.zoo import build
from galvatron_lite.model.zoo.gpt import random_tokens


class Leaving:
    """What runs an operator as it goes, as engines of training do that are given up."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        torch.ones(3).add_(1)


def test_what_goes_meanwhile_is_not_recorded() -> None:
    model = build("gpt-tiny")
    expected = trace(model, random_tokens(4, 16, 256))
    before = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    try:
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: [Leaving() for _ in range(7)] and None)
        assert trace(model, random_tokens(4, 16, 256)) == expected
        assert gc.isenabled()
    finally:
        gc.set_threshold(*before)
