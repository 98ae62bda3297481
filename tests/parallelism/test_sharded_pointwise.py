"""Pointwise functions and casts of cut tensors, against whole ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.sharded.calls import intercept_custom_functions
from galvatron_lite.parallelism.sharded.collectives import distribute
from galvatron_lite.parallelism.sharded.groups import ShapeOnlyAxisGroup
from galvatron_lite.parallelism.sharded.tensor import ShardedTensor, ShardSpec, specs_of, to_local
from galvatron_lite.parallelism.spatial.rules import PIXELS_RULES
from tests.parallelism.sharded_functions import Lines, compare, picture

PIXELS: Lines = (2, 3)
UNARY: list[Callable[[Tensor], Any]] = [
    functional.relu,
    functional.gelu,
    functional.hardswish,
    lambda x: functional.relu6(x * 3, inplace=True),
    lambda x: functional.silu(x * 1, inplace=True),
    lambda x: functional.leaky_relu(x, 0.2),
    lambda x: torch.clamp(x, min=-0.5, max=0.5),
    lambda x: (x * 1).clamp_(-1, 1).add_(2).mul_(x),
    lambda x: 2 - x / 3 + 1 / (x**2 + 1) - 2**x,
    lambda x: x.abs().sqrt().pow(3),
    lambda x: (-x).exp().log1p(),
    lambda x: torch.where(x > 0, x, 0.1 * x),
    lambda x: x.masked_fill(x < 0, 3.0),
    lambda x: x.clone().contiguous().to(torch.float64) + x.detach(),
    lambda x: x.float().double(),
    lambda x: x.to(memory_format=torch.channels_last) * torch.ones_like(x),
    lambda x: x.lerp(x * 2, 0.3) + torch.addcmul(x, x, x, value=0.5),
    lambda x: (x > 0) & ~(x > 1) | (x == 0),
    lambda x: (x > 0).float(),
]


@pytest.mark.parametrize("function", UNARY)
def test_functions_of_each_item(function: Callable[[Tensor], Any]) -> None:
    compare(function, [picture(2, 3, 5, 4)], [PIXELS], (3, 2), stays_cut=True)


@st.composite
def operands(draw: st.DrawFn) -> tuple[list[Tensor], list[Lines], tuple[int, ...]]:
    """Two or three tensors that are broadcast, the first whole in shape and cut, the others cut or not."""
    degrees = draw(st.sampled_from([(2,), (3,), (4,), (2, 2), (3, 2)]))
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(2, 7)), draw(st.integers(2, 6)))
    sides = draw(st.permutations([1, 2, 3]))[: len(degrees)]
    tensors, cut = [picture(*shape)], [tuple(sides)]
    for seed in range(1, draw(st.integers(2, 3))):
        dropped = draw(st.integers(0, 3))
        other = [1 if draw(st.booleans()) else extent for extent in shape][dropped:]
        tensors.append(picture(*other, seed=seed))
        same = [side - dropped if side >= dropped and other[side - dropped] == shape[side] else -1 for side in sides]
        cut.append(tuple(one if draw(st.booleans()) else -1 for one in same))
    return tensors, cut, degrees


@settings(max_examples=40, deadline=None)
@given(operands())
def test_operands_are_broadcast(case: tuple[list[Tensor], list[Lines], tuple[int, ...]]) -> None:
    tensors, cut, degrees = case

    def function(first: Tensor, *others: Tensor) -> Tensor:
        for other in others:
            first = other * first - torch.maximum(first, other) / (1 + other.square())
        return torch.lerp(first, others[0], 0.25)

    compare(function, tensors, cut, degrees, stays_cut=True)


@settings(max_examples=25, deadline=None)
@given(operands())
def test_what_writes_keeps_its_own_cuts(case: tuple[list[Tensor], list[Lines], tuple[int, ...]]) -> None:
    tensors, cut, degrees = case

    def function(first: Tensor, *others: Tensor) -> Tensor:
        target = first * 2
        written = target
        for other in others:
            written = written.add_(other)
            written *= other
        assert written is target
        return written

    compare(function, tensors, cut, degrees, stays_cut=True)


def test_tensors_that_are_cut_otherwise_are_brought_to_the_cuts_of_the_first() -> None:
    square = [picture(1, 2, 6, 6), picture(1, 2, 6, 6, seed=1)]
    compare(torch.mul, square, [(2, -1), (-1, 3)], (2, 2), stays_cut=True)
    compare(torch.mul, square, [(2,), (3,)], (3,), stays_cut=True)
    compare(lambda x, y: (x * 1).mul_(y), square, [(2,), (3,)], (3,), stays_cut=True)


def test_a_whole_tensor_that_is_written_to_stays_whole() -> None:
    compare(lambda x, y: (x * 1).add_(y), [picture(1, 2, 6, 5), picture(1, 2, 6, 5)], [(), (2,)], (3,), stays_cut=False)


def test_weights_of_channels_reach_their_channels() -> None:
    for cut in ((2, 3), (1, 3)):
        compare(functional.prelu, [picture(2, 5, 4, 4), picture(5)], [cut, ()], (2, 2), stays_cut=True)
    compare(functional.prelu, [picture(2, 5, 4, 4), picture(1)], [(2, 3), ()], (2, 2), stays_cut=True)


def on_one_rank(tensor: Tensor, size: int = 2, rank: int = 0) -> ShardedTensor:
    cut = distribute(tensor, (ShardSpec(2, tensor.shape[2], ShapeOnlyAxisGroup(size, rank)),), PIXELS_RULES)
    assert isinstance(cut, ShardedTensor)
    return cut


def test_a_function_that_returns_its_argument_leaves_plain_tensors_plain() -> None:
    plain = torch.ones(1, 1, 4, 4)
    found = plain.type_as(on_one_rank(plain.clone()))
    assert type(plain) is Tensor
    assert type(found) is Tensor
    cut = on_one_rank(plain)
    assert cut.contiguous() is cut or specs_of(cut.contiguous()) == cut.specs
    assert cut.to(torch.float32) is cut


def test_writing_to_a_given_tensor_is_refused() -> None:
    cut = on_one_rank(torch.ones(1, 1, 4, 4))
    with pytest.raises(InputError, match="out="):
        torch.add(cut, 1, out=torch.empty(4))
    with pytest.raises(InputError, match="data"):
        cut.data = torch.ones(1)


def test_shapes_that_cannot_be_broadcast_are_refused_as_torch_does() -> None:
    with pytest.raises(RuntimeError, match="broadcast"):
        on_one_rank(torch.ones(1, 1, 4, 4)) + torch.ones(2, 4)


def test_activations_in_place_save_no_copy() -> None:
    """Writing to a cut tensor is writing to the share itself: no views whose gradients would be copied."""
    leaf = torch.randn(1, 2, 4, 4, requires_grad=True)
    cut = functional.relu(on_one_rank(leaf) * 1, inplace=True)
    names = [cut.grad_fn.name()] if cut.grad_fn else []
    assert names == ["ReluBackward0"]
    assert to_local(cut).shape == (1, 2, 2, 4)


class Swish(torch.autograd.Function):
    """As users write it: autograd hands its backward pass a plain share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return gradient * (gate * (1 + x * (1 - gate)))


def test_functions_of_the_users_own() -> None:
    intercept_custom_functions()  # what they do with a share is not known: they get all of it
    compare(Swish.apply, [picture(2, 3, 5, 4)], [PIXELS], (3, 2), stays_cut=False, gathers=True)
