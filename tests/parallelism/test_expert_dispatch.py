"""Tokens sent to experts on several ranks (threads), against a loop over all experts in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import pytest
import torch
from torch import Tensor

from galvatron_lite.parallelism.expert.apply import ExpertSpread, mixed
from tests.parallelism.thread_group import ThreadGroup, grid_groups, run_threads

EXPERTS, HIDDEN, INNER, TOKENS, CHOICES = 4, 6, 8, 10, 2


@dataclass
class ThreadExchange:
    group: ThreadGroup

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def rank(self) -> int:
        return self.group.rank

    def swap(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        pieces = self.group.meeting.show(self.rank, [piece.detach().clone() for piece in rows.split(list(sent))])
        arrived = [pieces[peer][self.rank] for peer in range(self.size)]
        assert [len(piece) for piece in arrived] == list(received)
        return torch.cat(arrived)


@dataclass
class Drawn:
    """Weights of all experts, and each rank's tokens, their choices and the gradient of what is made of them."""

    up: Tensor
    down: Tensor
    hidden: list[Tensor]
    index: list[Tensor]
    weights: list[Tensor]
    wanted: list[Tensor]


def draw(ranks: int, choose: Callable[[int], Tensor]) -> Drawn:
    torch.manual_seed(0)
    up, down = torch.randn(EXPERTS, HIDDEN, INNER).double(), torch.randn(EXPERTS, INNER, HIDDEN).double()
    index = [choose(rank) for rank in range(ranks)]
    hidden = [torch.randn(len(one), HIDDEN).double() for one in index]
    weights = [torch.rand(one.shape).double() for one in index]
    return Drawn(up, down, hidden, index, weights, [torch.randn_like(one) for one in hidden])


def uneven(rank: int) -> Tensor:
    """Ranks have unlike numbers of tokens, expert 2 gets none, expert 0 most."""
    scores = torch.rand(TOKENS + 3 * rank, EXPERTS) + torch.tensor([1.0, 0.2, -9.0, 0.1])
    return scores.topk(CHOICES).indices


def one_expert(rank: int) -> Tensor:
    """All tokens of all ranks go to one expert; the last rank has none at all."""
    return torch.full((0 if rank == 1 else TOKENS, 1), 3)


def in_turn(up: Tensor, down: Tensor, rows: Tensor, numbers: Tensor) -> Tensor:
    """The experts one after the other; rows keep no gradient where there are none, as in transformers' loops."""
    made = torch.zeros_like(rows)
    for number in numbers.unique().tolist():
        (chosen,) = torch.where(numbers == number)
        made = made.index_add(0, chosen, torch.relu(rows[chosen] @ up[number]) @ down[number])
    return made


def dense(drawn: Drawn, rank: int, kept: Tensor | None = None) -> tuple[Tensor, ...]:
    """Output and gradients of hidden state, weights and experts of one rank's tokens, by a loop over the experts."""
    leaves = [one.clone().requires_grad_() for one in (drawn.hidden[rank], drawn.weights[rank], drawn.up, drawn.down)]
    hidden, weights, up, down = leaves
    used = weights if kept is None else weights * kept
    every = torch.stack([torch.relu(hidden @ a) @ b for a, b in zip(up, down, strict=True)], 1)
    out = (every.gather(1, drawn.index[rank][..., None].expand(-1, -1, HIDDEN)) * used[..., None]).sum(1)
    out.backward(drawn.wanted[rank])
    return out.detach(), *(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves)


def spread_out(drawn: Drawn, ranks: int, slices: int = 1, capacity: float | None = None) -> list[tuple[Tensor, ...]]:
    """The same by rank, with the experts spread over rows of a grid of ranks and sliced over its columns."""

    def work(group: ThreadGroup) -> tuple[Tensor, ...]:
        spread_line, slice_line = grid_groups(group, ranks // slices, slices)
        here, part = EXPERTS // spread_line.size, INNER // slices
        first, start = here * spread_line.rank, part * slice_line.rank
        up, down = drawn.up[first : first + here], drawn.down[first : first + here]
        up, down = up[:, :, start : start + part], down[:, start : start + part]
        leaves = [
            one.clone().requires_grad_() for one in (drawn.hidden[group.rank], drawn.weights[group.rank], up, down)
        ]
        hidden, weights, up, down = leaves
        among = ThreadExchange(slice_line) if slices > 1 else None
        spread = ExpertSpread(EXPERTS, ThreadExchange(spread_line), among, capacity)
        out = mixed(hidden, drawn.index[group.rank], weights, spread, lambda x, n: in_turn(up, down, x, n))
        out.backward(drawn.wanted[group.rank])
        return out.detach(), *(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves)

    return run_threads(ranks, work)


@pytest.mark.parametrize("choose", [uneven, one_expert])
@pytest.mark.parametrize("ranks", [2, 4])
def test_spread_experts_make_what_all_make_on_one_rank(ranks: int, choose: Callable[[int], Tensor]) -> None:
    drawn = draw(ranks, choose)
    expected = [dense(drawn, rank) for rank in range(ranks)]
    found = spread_out(drawn, ranks)
    for one, other in zip(found, expected, strict=True):
        for place in range(3):
            torch.testing.assert_close(one[place], other[place])
    for place in (3, 4):
        # each expert is on one rank, where all tokens' gradients come together
        torch.testing.assert_close(torch.cat([one[place] for one in found]), sum(one[place] for one in expected))


def test_slices_of_experts_that_work_on_shares_of_the_tokens() -> None:
    drawn = draw(4, uneven)
    expected = [dense(drawn, rank) for rank in range(4)]
    found = spread_out(drawn, 4, slices=2)
    for one, other in zip(found, expected, strict=True):
        for place in range(3):
            torch.testing.assert_close(one[place], other[place])
    for place, dim in ((3, 2), (4, 1)):
        rows = [torch.cat([found[first][place], found[first + 1][place]], dim) for first in (0, 2)]
        torch.testing.assert_close(torch.cat(rows), sum(one[place] for one in expected))


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3])
def test_beyond_capacity_later_tokens_and_second_choices_are_dropped(factor: float) -> None:
    drawn = draw(2, uneven)
    found = spread_out(drawn, 2, capacity=factor)
    dropped = 0
    for rank in range(2):
        index = drawn.index[rank]
        room = [ceil(factor * index.numel() / EXPERTS)] * EXPERTS
        kept = torch.zeros(index.shape).double()
        for choice in range(CHOICES):
            for token in range(len(index)):
                expert = int(index[token, choice])
                kept[token, choice], room[expert] = float(room[expert] > 0), room[expert] - 1
        dropped += int((kept == 0).sum())
        for one, other in zip(found[rank][:3], dense(drawn, rank, kept)[:3], strict=True):
            torch.testing.assert_close(one, other)
    assert dropped > 0


def test_capacity_for_all_is_dropless() -> None:
    drawn = draw(2, uneven)
    for one, other in zip(spread_out(drawn, 2, capacity=EXPERTS), spread_out(drawn, 2), strict=True):
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine, theirs)
