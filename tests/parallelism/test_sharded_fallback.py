"""What cut tensors tell, what is random on them, and what has no rule."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.channel.apply import CHANNELS_RULES
from galvatron_lite.parallelism.sharded.collectives import distribute, enter, full_tensor, leave, sum_over
from galvatron_lite.parallelism.sharded.groups import ShapeOnlyAxisGroup
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Rules,
    ShardedTensor,
    ShardSpec,
    from_local,
    image_specs,
    specs_of,
    to_local,
)
from galvatron_lite.parallelism.spatial.rules import PIXELS_RULES
from tests.parallelism.sharded_compare import Lines, compare, picture
from tests.parallelism.thread_group import ThreadGroup, run_threads

PIXELS: Lines = (2, 3)


def on_one_rank(tensor: Tensor, dim: int = 2, size: int = 2, rank: int = 0) -> ShardedTensor:
    cut = distribute(tensor, (ShardSpec(dim, tensor.shape[dim], ShapeOnlyAxisGroup(size, rank)),), PIXELS_RULES)
    assert isinstance(cut, ShardedTensor)
    return cut


class Sorter(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, x)


def test_what_has_no_rule_gets_the_whole_picture() -> None:
    compare(Sorter(), [picture(2, 3, 5, 4)], [PIXELS], (2, 2), stays_cut=False, gathers=True)
    compare(
        lambda x, y: torch.block_diag(*[x[0, 0], y[0, 0]]),
        [picture(1, 1, 4, 4)] * 2,
        [PIXELS, ()],
        (2, 2),
        gathers=True,
    )


def test_the_warning_names_function_module_and_remedy_once_a_place() -> None:
    cut, module = on_one_rank(picture(1, 1, 4, 4)), Sorter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            module(cut)
        torch.cdist(cut, cut)
    first, second = (str(one.message) for one in said)
    assert "torch.cdist" in first
    assert f"Sorter, {__file__}" in first
    assert "has no rule for split pictures" in first
    assert "plan with --fix LAYER.height=1 --fix LAYER.width=1 (" in first
    assert "Sorter" not in second


def test_one_rank_of_the_picture_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Sorter()(on_one_rank(picture(1, 1, 4, 4), rank=1))


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.index_fill_(1, torch.tensor([0]), 1.0),
        lambda x: x.scatter_(1, torch.zeros(1, 1, 4, 4, dtype=torch.long), 1.0),
        lambda x: x.cumsum_(2),
        lambda x: x.squeeze_(),
        lambda x: torch.cdist(x, x, out=x),
        lambda x: functional.normalize(x, dim=2, out=x),
    ],
)
def test_writing_without_a_rule_is_refused(write: Callable[[Tensor], Any]) -> None:
    with pytest.raises((InputError, TypeError), match=r"split picture|out=|unexpected keyword"):
        write(on_one_rank(torch.zeros(1, 1, 4, 4)))


def test_queries_of_a_shard_answer_for_the_whole_tensor() -> None:
    leaf = picture(2, 3, 5, 4).requires_grad_()
    cut = on_one_rank(leaf)
    assert cut.shape == leaf.shape == cut.size()
    assert (cut.size(2), cut.size(dim=-2), len(cut), cut.dim(), cut.ndim, cut.numel()) == (5, 5, 2, 4, 4, 120)
    assert cut.stride() == cut.contiguous().stride() == leaf.stride()
    assert cut.permute(0, 2, 3, 1).stride() == leaf.permute(0, 2, 3, 1).stride()
    assert (cut.dtype, cut.device, cut.requires_grad, cut.is_leaf) == (leaf.dtype, leaf.device, True, False)
    assert cut.is_floating_point()
    assert not cut.is_complex()
    assert isinstance(cut, Tensor)
    assert cut.grad_fn is not None
    assert cut in {cut: 1}
    assert "dim 2: 0..3 of 5" in repr(cut)
    assert type(cut.new_zeros(3)) is Tensor
    assert torch.is_tensor(cut)
    assert torch.result_type(cut, 1) == torch.float64
    assert not torch.is_grad_enabled() or cut.detach().requires_grad_().is_leaf


def test_gradients_and_hooks_of_cut_tensors_are_cut() -> None:
    weight = picture(2, 3, 5, 4)

    def work(group: ThreadGroup) -> tuple[Tensor, Tensor, Tensor]:
        leaf = picture(2, 3, 5, 4).requires_grad_()
        cut = distribute(leaf, (ShardSpec(2, 5, group),), PIXELS_RULES)
        cut.retain_grad()
        seen = []

        def hook(gradient: Tensor) -> Tensor:
            seen.append(gradient)
            return gradient * 2

        cut.register_hook(hook)
        (cut * weight).sum().backward()
        assert leaf.grad is not None
        return full_tensor(seen[0]), full_tensor(cut.grad), leaf.grad

    found = run_threads(2, work)
    for seen, gradient, _ in found:
        # each of two ranks starts a backward pass
        assert torch.allclose(seen, 2 * weight)
        assert torch.allclose(gradient, 4 * weight)
    assert torch.allclose(sum(one[2] for one in found), 4 * weight)


RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "dropout in place": lambda x: functional.dropout(x * 1, 0.5, inplace=True),
}


def shares(function: Callable[[Tensor], Tensor], size: int, dim: int = 2) -> tuple[list[Tensor], list[Tensor]]:
    """What each rank gets in the same random state, and what it draws next."""
    found, drawn = [], []
    for rank in range(size):
        torch.manual_seed(5)
        found.append(to_local(function(on_one_rank(torch.ones(2, 8, 9, 40), dim, size, rank))))
        drawn.append(torch.rand(2))
    return found, drawn


@pytest.mark.parametrize("name", RANDOM)
def test_random_items_differ_between_ranks_and_leave_their_state_equal(name: str) -> None:
    found, drawn = shares(RANDOM[name], 2)
    # shares of 5 and of 4 rows
    assert [one.shape[2] for one in found] == [5, 4]
    assert not torch.equal(found[0][:, :, :4], found[1])
    assert torch.equal(drawn[0], drawn[1])
    again, _ = shares(RANDOM[name], 2)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_dropped_items_keep_the_mean_and_take_their_gradients_along() -> None:
    leaf = torch.ones(4, 8, 32, 32, requires_grad=True)
    kept = functional.dropout(on_one_rank(leaf), 0.25)
    share = to_local(kept)
    assert share.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert share.mean().item() == pytest.approx(1, abs=0.02)
    share.sum().backward()
    assert torch.equal(leaf.grad[:, :, :16], share)


@pytest.mark.parametrize("training", [False, True])
def test_dropout_at_rate_0_and_in_evaluation(training: bool) -> None:
    compare(
        lambda x: functional.dropout(x, 0.0 if training else 0.5, training) * 2, [picture(2, 3, 5, 4)], [PIXELS], (2, 2)
    )
    compare(
        lambda x: functional.dropout2d(x, 0.0 if training else 0.5, training) * 2,
        [picture(2, 3, 5, 4)],
        [PIXELS],
        (2, 2),
    )
    with pytest.raises(InputError, match="dropout"):
        functional.dropout(on_one_rank(picture(1, 1, 4, 4)), 1.5)


def test_dropped_channels_are_the_same_on_all_ranks() -> None:
    found, drawn = shares(lambda x: functional.dropout2d(x, 0.5), 2)
    channels = [one[:, :, 0, 0] for one in found]
    assert torch.equal(channels[0], channels[1])
    assert all(torch.equal(one, one[:, :, :1, :1].expand_as(one)) for one in found)
    assert torch.equal(drawn[0], drawn[1])


def test_ranks_that_hold_other_channels_drop_their_own() -> None:
    for inplace in (False, True):
        found, drawn = shares(lambda x, w=inplace: functional.dropout2d(x * 1, 0.5, inplace=w), 2, dim=1)
        assert not torch.equal(*found)
        assert all(torch.equal(one, one[:, :, :1, :1].expand_as(one)) for one in found)
        assert torch.equal(drawn[0], drawn[1])
        assert set(found[0].unique().tolist()) == {0.0, 2.0}


def test_recomputation_drops_the_same_again() -> None:
    leaf = torch.ones(1, 2, 8, 8, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        return functional.dropout(functional.relu(x * 1, inplace=True) ** 2, 0.5)

    result = checkpoint(lambda x: to_local(block(on_one_rank(x))), leaf, use_reentrant=False)
    result.sum().backward()
    assert torch.equal(leaf.grad[:, :, :4], 2 * result)


def test_lower_precision_is_chosen_as_for_whole_tensors() -> None:
    weight = picture(4, 3).float()

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return functional.linear(x.float().permute(0, 2, 3, 1), weight)

    compare(function, [picture(2, 3, 5, 4)], [PIXELS], (2, 2), stays_cut=True, tolerance=1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert functional.linear(on_one_rank(picture(1, 1, 4, 3).float()), weight).dtype == torch.bfloat16


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_users_recompute(reentrant: bool) -> None:
    def function(x: Tensor) -> Tensor:
        doubled = x * 2
        return checkpoint(lambda y: functional.gelu(y) * y.mean((2, 3), keepdim=True), doubled, use_reentrant=reentrant)

    compare(function, [picture(2, 3, 5, 4)], [PIXELS], (2, 2), stays_cut=True)


def test_gradients_that_are_asked_of_autograd() -> None:
    start = picture(2, 3, 5, 4, seed=1)
    expected = picture(2, 3, 5, 4).requires_grad_()
    (expected.exp() * start).sum().backward()

    def work(group: ThreadGroup) -> list[Tensor]:
        cut = distribute(picture(2, 3, 5, 4).requires_grad_(), (ShardSpec(2, 5, group),), PIXELS_RULES)
        half = distribute(start.clone(), specs_of(cut), PIXELS_RULES)
        found = [torch.autograd.grad(cut.exp(), [cut], one)[0] for one in (start, half, to_local(half))]
        cut.retain_grad()
        cut.exp().backward(start)
        assert cut.grad is not None
        with pytest.raises(InputError, match="create_graph"):
            torch.autograd.grad(cut.exp(), cut, start, create_graph=True)
        return [full_tensor(one) for one in (*found, cut.grad)]

    for found in run_threads(2, work):
        assert all(torch.allclose(one, expected.grad) for one in found if expected.grad is not None)
        assert len(found) == 4


@pytest.mark.parametrize(
    "function", [lambda x: functional.pixel_shuffle(x, 2), lambda x: functional.adaptive_avg_pool2d(x, 3)]
)
def test_a_size_that_is_gathered_by_design_warns(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.warns(UserWarning, match="gathers pictures of this size by design"):
        function(on_one_rank(picture(1, 4, 5, 4)))


def test_the_remedy_names_what_cut_the_tensor() -> None:
    tokens = on_one_rank(picture(1, 2, 4, 3)).permute(0, 2, 3, 1)
    with pytest.warns(UserWarning, match=r"plan with --fix LAYER.height=1 --fix LAYER.width=1 \("):
        torch.cdist(tokens, tokens)
    shares = distribute(picture(1, 4, 2, 2), (ShardSpec(1, 4, ShapeOnlyAxisGroup(2)),), CHANNELS_RULES)
    with pytest.warns(UserWarning, match=r"plan with --fix LAYER.channels=1 \("):
        torch.cdist(shares, shares)


# Cut tensors: what they tell, how they are gathered and how gradients flow, against the whole tensor.


def gathered(call: Call) -> object:
    return call.function(*[full_tensor(arg) if isinstance(arg, Tensor) else arg for arg in call.args], **call.kwargs)


RULES = Rules({}, gathered)


def test_a_share_of_another_length_is_refused() -> None:
    def work(group: ThreadGroup) -> None:
        cuts = image_specs((1, 1, 5, 4), (None, group, None))
        with pytest.raises(InputError, match="holds"):
            from_local(torch.zeros(1, 1, 4, 4), cuts, RULES)

    run_threads(2, work)


@pytest.mark.parametrize("size", [1, 2])
def test_what_collectives_return_may_be_written_to(size: int) -> None:
    def work(group: ThreadGroup) -> None:
        leaf = torch.ones(1, 2, 4, 2, requires_grad=True)
        cut = distribute(leaf, (ShardSpec(2, 4, group),), RULES)
        for made in (full_tensor(cut), sum_over(leaf * 1, [group]), enter(leaf * 1, [group]), leave(leaf * 1, [group])):
            torch.relu_(made).sum().backward()
        saved = (leaf * 1).sigmoid()
        enter(saved, [group]).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.sum().backward()

    run_threads(size, work)
