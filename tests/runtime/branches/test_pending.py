"""Pending tensors: what they tell, what is put off, and in which order values are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.branches.pending import Applied, PendingTensor, pending


class Run:
    """A run of a model."""

    def __init__(self) -> None:
        self.device, self.applied, self.shapes = torch.device("cpu"), list[Applied](), dict[object, Any]()


class Source:
    """Gives a value, and counts how often it was asked for."""

    def __init__(self, value: Tensor) -> None:
        self.run, self._value, self.asked = Run(), value, 0

    def value(self) -> Tensor:
        self.asked += 1
        return self._value


def source(value: Tensor) -> tuple[Any, Source]:
    made = Source(value)
    return pending(made, torch.empty_like(value, device="meta")), made


def test_shape_and_type_are_told_without_the_value() -> None:
    tensor, made = source(torch.ones(2, 3))
    assert (tensor.shape, len(tensor), tensor.dim(), tensor.dtype) == ((2, 3), 2, 2, torch.float32)
    assert tensor.size(-1) == 3
    assert tensor.device == torch.device("cpu")
    assert made.asked == 0


def test_functions_are_put_off_until_a_value_is_needed() -> None:
    tensor, made = source(torch.arange(6.0).view(2, 3))
    first, second = (tensor * 2).to(torch.float64, copy=True).split(1)
    joined = torch.cat([second, first + 1])
    assert isinstance(joined, PendingTensor)
    assert (joined.shape, made.asked) == ((2, 3), 0)
    assert joined.sum().item() == 33
    assert joined.tolist() == [[6, 8, 10], [1, 3, 5]]
    assert bool(joined.any())


def test_a_function_that_depends_on_values_gets_them() -> None:
    tensor, made = source(torch.tensor([1.0, 0.0, 2.0]))
    found = tensor.nonzero()
    assert found.tolist() == [[0], [2]]
    assert made.asked > 0


def test_what_was_put_off_reads_what_was_there_before_a_change() -> None:
    tensor, _ = source(torch.ones(2))
    doubled = tensor * 2
    tensor.add_(5)
    assert doubled.tolist() == [2, 2]
    assert (tensor + 0).tolist() == [6, 6]


def test_a_change_of_an_argument_is_an_error() -> None:
    tensor, _ = source(torch.ones(2))
    other = torch.ones(2)
    total = tensor + other
    other.zero_()
    with pytest.raises(InputError, match="changed in place"):
        total.tolist()


def test_modes_are_those_of_the_call() -> None:
    tensor, _ = source(torch.ones(2))
    weight = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        still = tensor * weight
    moving = tensor * weight
    assert (still.requires_grad, moving.requires_grad) == (False, True)
    assert (torch.add(still, 0.0).sum().item(), still.node.value().requires_grad) == (2.0, False)
    moving.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1]


def test_many_functions_one_after_the_other() -> None:
    tensor, _ = source(torch.zeros(1))
    for _ in range(3000):
        tensor = tensor + 1
    assert tensor.item() == 3000
