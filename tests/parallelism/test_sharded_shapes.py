"""Functions of each item, and those that change shapes, take parts and join, on cut tensors against whole ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.overrides import BaseTorchFunctionMode

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.sharded.calls import intercept_custom_functions
from galvatron_lite.parallelism.sharded.collectives import distribute
from galvatron_lite.parallelism.sharded.groups import ShapeOnlyAxisGroup
from galvatron_lite.parallelism.sharded.indexing import rows_stay
from galvatron_lite.parallelism.sharded.tensor import ShardedTensor, ShardSpec, specs_of, to_local
from galvatron_lite.parallelism.spatial.rules import PIXELS_RULES
from tests.parallelism.sharded_compare import Lines, compare, picture
from tests.parallelism.thread_group import ThreadGroup, run_threads

PIXELS: Lines = (2, 3)
Function = Callable[[Tensor], Any]

STAYS: dict[str, Function] = {
    "permute": lambda x: x.permute(0, 2, 3, 1) * 2,
    "permute by list": lambda x: torch.permute(x, [3, 0, 1, 2]),
    "permute by name": lambda x: torch.permute(input=x, dims=(3, 0, 1, 2)),
    "transpose": lambda x: x.transpose(1, -1).swapaxes(0, 1).movedim(0, -1),
    "mT": lambda x: x.mT,
    "unsqueeze": lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze(1).squeeze(),
    "view": lambda x: x.view(2, 2, 2, 7, 5).transpose(1, 2).reshape(2, 4, 7, -1),
    "view by size": lambda x: x.view(x.size(0), -1, *x.shape[2:]),
    "flatten": lambda x: x.flatten(0, 1).unflatten(0, (4, 2)),
    "view as": lambda x: x.view_as(x) + x.reshape_as(x),
    "expand": lambda x: x.unsqueeze(1).expand(-1, 3, -1, -1, -1).flatten(1, 2),
    "repeat": lambda x: x.repeat(1, 2, 1, 1) + x.repeat_interleave(2, 1),
    "flip": lambda x: x.flip(1) + torch.roll(x, 1, 1) + torch.roll(x, (1, 1), dims=(0, 1)) + x.flip(0, 1),
    "chunk": lambda x: x.chunk(3, 1),
    "split": lambda x: torch.split(x, [1, 3], dim=1),
    "unbind": lambda x: list(x),
    "sort": lambda x: torch.sort(x, 1),
    "topk": lambda x: x.topk(2, dim=1)[0],
    "index": lambda x: x[:, [2, 0, 1]] + x[:, 1:, :, :],
    "index by tensor": lambda x: x[:, torch.tensor([3, 0])] + x.index_select(1, torch.tensor([1, 1])),
    "new dim": lambda x: x[:, None, ..., None],
    "sample": lambda x: x[1],
    "crop": lambda x: x[:, 1:3, 1:6, 2:],
    "every other": lambda x: torch.cat([x[..., ::2, 1::2], x[..., 1::2, :2][..., :1, :].expand(2, 4, 4, 2)], 1),
    "row": lambda x: x[:, :, 3] + x[:, :, -1] + x.select(2, 0),
    "narrow": lambda x: torch.narrow(x, 2, 1, 4).narrow(-1, 1, 3),
    "stack": lambda x: torch.stack([x, x * 2], 2),
    "softmax": lambda x: x.softmax(1).log_softmax(dim=1),
    "size": lambda x: x.view(x.shape[0] * x.shape[1], *x.shape[2:]) * x.numel() * len(x) * x.dim(),
    "pixels": lambda x: x.flatten(2).transpose(1, 2),
    "rows of channels": lambda x: x.transpose(1, 2).reshape(2, 28, 5),
    "pixels and back": lambda x: (x.flatten(2) * 2).transpose(1, 2).mT.reshape(x.shape),
    "groups of rows": lambda x: x[:, :, :6].reshape(2, 4, 3, 2, 5).sum(3),
    "channel shuffle": lambda x: torch.channel_shuffle(x, 2),
    "center crop": lambda x: x[..., (x.size(-2) - 3) // 2 :, :][..., :3, 1:4],
}
GATHERS: dict[str, Function] = {
    "features": lambda x: torch.flatten(x, 1),
    "all": lambda x: x.reshape(-1),
    "blocks": lambda x: x.reshape(2, 28, 5)[:, :, 0],
    "one pixel": lambda x: x[:, :, -1, None, 2],
    "rows sorted": lambda x: x.sort(dim=2)[0].cumsum(3),
    "places": lambda x: x[x > 0],
    "list of rows": lambda x: x[:, :, [0, 3]][..., torch.tensor([1])],
    "arg": lambda x: torch.argmax(x),
    "cat of rows": lambda x: torch.cat([x, x], 2).unbind(3),
    "rolled rows": lambda x: x.roll(1, 2).flip(3),
}


@pytest.mark.parametrize("name", STAYS)
def test_dims_that_are_kept_apart_stay_cut(name: str) -> None:
    compare(STAYS[name], [picture(2, 4, 7, 5)], [PIXELS], (3, 2), stays_cut=True, gathers=None)
    compare(STAYS[name], [picture(2, 4, 7, 5)], [(3,)], (4,), gathers=None)


@pytest.mark.parametrize("name", GATHERS)
def test_dims_that_are_merged_or_picked_from_are_gathered(name: str) -> None:
    compare(GATHERS[name], [picture(2, 4, 7, 5)], [PIXELS], (3, 2), stays_cut=False, gathers=None)


def test_channels_may_be_cut_too() -> None:
    for name, function in (STAYS | GATHERS).items():
        if name != "view":
            compare(function, [picture(2, 4, 7, 5)], [(1,)], (3,), gathers=None)


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(shape, another shape of as many items, cut dims): factors grouped in two ways."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=3, max_size=5))

    def grouped() -> tuple[int, ...]:
        ends = sorted(draw(st.sets(st.integers(1, len(factors) - 1), min_size=1)))
        edges = list(zip([0, *ends], [*ends, len(factors)], strict=True))
        return tuple(int(torch.tensor(factors[start:stop]).prod()) for start, stop in edges)

    shape = grouped()
    return shape, grouped(), tuple(draw(st.permutations(range(len(shape))))[: draw(st.integers(1, 2))])


@settings(max_examples=40, deadline=None)
@given(views(), st.sampled_from([2, 3]))
def test_any_reshape(case: tuple[tuple[int, ...], ...], degree: int) -> None:
    before, after, cut = case
    compare(lambda x: x.reshape(after) * 1, [picture(*before)], [cut], (degree, 2)[: len(cut)], gathers=None)


def indices(extent: int) -> st.SearchStrategy[Any]:
    edge = st.none() | st.integers(-extent - 1, extent + 1)
    slices = st.builds(slice, edge, edge, st.none() | st.integers(1, 3))
    return slices | slices | st.integers(-extent, extent - 1)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_slices(data: st.DataObject) -> None:
    shape = (2, 3, data.draw(st.integers(1, 9)), data.draw(st.integers(2, 7)))
    index = tuple(data.draw(indices(extent)) for extent in shape)[: data.draw(st.integers(1, 4))]
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(index)))
        more = data.draw(st.sampled_from([None, Ellipsis]))
        # what is behind dots is of the last dims
        after = (
            index[place:] if more is None else tuple(data.draw(indices(one)) for one in shape[place + 4 - len(index) :])
        )
        index = (*index[:place], more, *after)
    cut, degrees = data.draw(st.sampled_from([((2,), (3,)), ((3,), (2,)), ((1, 2), (2, 2)), ((2, 3), (2, 3))]))
    compare(lambda x: x[index] * 2, [picture(*shape)], [cut], degrees)


@pytest.mark.parametrize("cut", [(2, 3), (3, 2), (2, -1)])
def test_joined_tensors_share_their_cuts(cut: Lines) -> None:
    both = [picture(2, 2, 5, 4), picture(2, 3, 5, 4, seed=1)]
    for given_cut in ([cut, cut], [cut, ()], [(), cut], [cut, cut[::-1]]):
        compare(lambda x, y: torch.cat([x, y, x], dim=1), both, given_cut, (2, 2), stays_cut=True)
        compare(lambda x, y: torch.stack((x, y[:, 1:]), dim=-1), both, given_cut, (2, 2), stays_cut=True)


def test_parts_of_whole_dims_are_written_to() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        made = x * 1
        made[:, 1:3] = y[:, :2]
        made[:, 0] = 0.0
        made[0, :, :, :].mul_(2)
        made[:, 3] += y[:, 0]
        return made

    for cut in (PIXELS, ()):
        both = [picture(2, 4, 7, 5), picture(2, 4, 7, 5, seed=1)]
        compare(function, both, [PIXELS, cut], (3, 2), stays_cut=True)


def test_rows_of_split_dims_are_written_to() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        made = x * 1
        made[:, 1, 4] = y[:, 0, -2]
        made[0, ..., 1:5, -1] = y[1, :, 0:1, 2]
        made[..., 2:, 1:4] += y[..., :5, 2:]
        made[:, :, 3] = made[:, :, 0] * 2
        made[..., 0, :2] = 0.5
        made[:, [0, 2], 5:6, None] = y[:, :2, 1:2, None]
        return made

    both = [picture(2, 4, 7, 5), picture(2, 4, 7, 5, seed=1)]
    for cut, degrees in ((PIXELS, (3, 2)), ((2,), (4,)), ((3,), (2,))):
        for other in (cut, ()):
            compare(function, both, [cut, other], degrees, stays_cut=True, gathers=None)


def test_writes_to_slices_of_split_dims_reach_their_tensor() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        made = x * 1
        made[:, :, 2:].mul_(0.5)
        made[..., 1:4][:, :2].add_(y[..., 1:4][:, :2])
        made[..., -2][0] = 3.0
        made.narrow(2, 1, 4).copy_(y[:, :, :4])
        functional.relu(made[..., 1:, :2], inplace=True)
        return made

    both = [picture(2, 4, 7, 5), picture(2, 4, 7, 5, seed=1)]
    for cut in (PIXELS, ()):
        compare(function, both, [PIXELS, cut], (3, 2), stays_cut=True, gathers=None)


def test_writes_to_rows_that_are_copies_are_refused() -> None:
    cut = distribute(torch.zeros(1, 1, 6, 6), (ShardSpec(2, 6, ShapeOnlyAxisGroup(2)),), PIXELS_RULES)
    with rows_stay():
        cut[:, :, 0] += 1
        cut[..., :2].clamp_(max=1)
    with pytest.raises(InputError, match="rows or views taken of split"), rows_stay():
        cut[:, :, 0].zero_()
    with pytest.raises(InputError, match="rows or views taken of split"), rows_stay():
        cut.view(4, 9).zero_()
    with pytest.raises(InputError, match="view of a slice"):
        cut[:, :, 1:].transpose(2, 3).zero_()


def test_writing_to_places_of_a_split_dim_is_refused() -> None:
    cut = distribute(torch.zeros(1, 1, 6, 6), (ShardSpec(2, 6, ShapeOnlyAxisGroup(2)),), PIXELS_RULES)
    for index in ((..., slice(1, 3, 2), slice(None)), (0, 0, [2, 3]), cut > 0):
        with pytest.raises(InputError, match="__setitem__ of a split picture"):
            cut[index] = 1.0


def test_rows_that_nobody_moves_cost_nothing() -> None:
    def work(group: ThreadGroup) -> int:
        cut = distribute(picture(1, 2, 8, 6), (ShardSpec(2, 8, group),), PIXELS_RULES)
        assert to_local(cut[:, :, ::2, 1:]).shape == (1, 2, 2, 5)
        assert to_local(cut[..., 2:]).shape == (1, 2, 4, 4)
        return group.sent_bytes

    assert run_threads(2, work) == [0, 0]


def test_a_crop_sends_the_rows_that_change_hands() -> None:
    def work(group: ThreadGroup) -> int:
        cut = distribute(picture(1, 2, 8, 6), (ShardSpec(2, 8, group),), PIXELS_RULES)
        assert to_local(cut[:, :, 2:]).shape == (1, 2, 3, 6)
        return group.sent_bytes

    assert run_threads(2, work) == [0, 2 * 6 * 8]


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


def test_functions_of_the_users_own_under_a_mode() -> None:
    """As selective recomputation has one, which takes the call before the rules do."""
    intercept_custom_functions()

    def under_a_mode(x: Tensor) -> Any:
        with BaseTorchFunctionMode():
            return Swish.apply(x)

    compare(under_a_mode, [picture(2, 3, 5, 4)], [PIXELS], (3, 2), stays_cut=False, gathers=True)


def test_transforms_of_split_tensors_are_refused() -> None:
    intercept_custom_functions()
    cut = on_one_rank(torch.ones(2, 1, 4, 4))
    for transform in (
        torch.vmap(torch.sum),
        torch.func.grad(torch.sum),
        lambda x: torch.func.jvp(torch.sin, (x,), (x,)),
    ):
        with pytest.raises(InputError, match=r"torch\.func of a split picture"):
            transform(cut)
