"""Cut tensors: what they tell, how they are gathered and how gradients flow, against the whole tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.sharded.collectives import distribute, enter, full_tensor, leave, sum_over
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Rules,
    ShardSpec,
    from_local,
    global_shape,
    image_specs,
    specs_of,
    to_local,
)
from tests.parallelism.thread_group import ThreadGroup, grid_groups, run_threads


def gathered(call: Call) -> object:
    return call.function(*[full_tensor(arg) if isinstance(arg, Tensor) else arg for arg in call.args], **call.kwargs)


RULES = Rules({}, gathered)


@pytest.mark.parametrize(("rows", "columns"), [(2, 1), (1, 3), (2, 2)])
def test_shares_of_a_picture_gather_to_the_whole_and_gradients_come_back(rows: int, columns: int) -> None:
    picture = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    weight = torch.randn(2, 3, 5, 7, dtype=torch.float64)

    def work(group: ThreadGroup) -> tuple[Tensor, Tensor]:
        down, along = grid_groups(group, rows, columns)
        groups = (None, down if rows > 1 else None, along if columns > 1 else None)
        leaf = picture.clone().requires_grad_()
        cut = distribute(leaf, image_specs(picture.shape, groups), RULES)
        assert global_shape(cut) == (2, 3, 5, 7)
        assert to_local(cut).shape != picture.shape
        assert all(one.length == to_local(cut).shape[one.dim] for one in specs_of(cut))
        together = full_tensor(cut)
        (together * weight).sum().backward()
        assert leaf.grad is not None
        return together.detach(), sum_over(leaf.grad, [group])

    for together, gradient in run_threads(rows * columns, work):
        assert torch.equal(together, picture)
        # every rank's loss counts
        assert torch.allclose(gradient, rows * columns * weight)


def test_functions_without_a_rule_go_to_the_one_for_all_others() -> None:
    def work(group: ThreadGroup) -> Tensor:
        cuts = image_specs((1, 1, 2, 5), (None, None, group))
        cut = distribute(torch.arange(10.0).view(1, 1, 2, 5), cuts, RULES)
        return torch.sort(cut, descending=True)[0]

    for found in run_threads(2, work):
        assert type(found) is Tensor
        assert found.tolist() == [[[[4.0, 3.0, 2.0, 1.0, 0.0], [9.0, 8.0, 7.0, 6.0, 5.0]]]]


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
