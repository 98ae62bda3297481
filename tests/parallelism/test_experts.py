"""Experts: where they are found in a model, how they are sliced, and where tokens go."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil

import pytest
import torch
import transformers
from torch import Tensor, nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import InputError
from galvatron_lite.model.zoo import build
from galvatron_lite.model.zoo.moe import Mixture as ZooMixture
from galvatron_lite.model.zoo.moe import MoEConfig
from galvatron_lite.parallelism.expert.apply import ExpertSpread, find_slices, mixed, spread_experts, sum_slices
from galvatron_lite.parallelism.expert.find import find_mixtures
from galvatron_lite.parallelism.tensor.regions import ExpertSlices
from tests.parallelism.sharded_compare import gather_full
from tests.parallelism.thread_group import ThreadGroup, grid_groups, run_threads

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 16, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MANY = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS = {
    "Mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}, 64),
    "Qwen2Moe": (transformers.Qwen2MoeConfig, MANY, 16),
    "Qwen3Moe": (transformers.Qwen3MoeConfig, {**MANY, "head_dim": 8}, 16),
    "Olmoe": (transformers.OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}, 64),
}


def of_transformers(name: str) -> nn.Module:
    kind, fields, _ = CONFIGS[name]
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(kind(**{**SHAPE, **fields}))
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_mixtures_of_transformers_are_found_counted_and_sliced(name: str) -> None:
    model, inner = of_transformers(name), CONFIGS[name][2]
    ids = torch.zeros(2, 16, dtype=torch.long)
    kind = trace(model, {"input_ids": ids, "labels": ids}).kinds["block"]
    assert kind.dims.experts == 4
    assert kind.expert_parameters == 4 * 3 * 32 * inner
    assert kind.dispatched_bytes == 16 * 2 * 32 * 4
    assert kind.expert_reason == ""
    block = model.get_submodule("model.layers.0")
    (mixture,) = find_mixtures(block)
    assert (mixture.path, mixture.experts) == ("mlp.experts", 4)
    found = find_slices(block, mixture, 32)
    assert isinstance(found, ExpertSlices)
    assert [(one.name, one.dim, one.parts) for one in found.parameters] == [
        ("gate_up_proj", 1, (inner, inner)), ("down_proj", 2, (inner,)),
    ]  # fmt: skip
    assert found.max_degree == inner // 8


def test_capture_counts_the_flops_of_the_experts_that_tokens_visit() -> None:
    kind = trace(build("moe-tiny"), build("moe-tiny").example_batch(2)).kinds["block"]
    experts = [one for one in kind.operators if one.name == "mlp.experts"]
    assert sum(one.flops for one in experts) == 3 * 2 * (64 * 2) * 64 * 64
    assert sum(one.count for one in experts if one.flops) == 3 * 8
    assert kind.sequence_parallel
    assert kind.tensor_degrees % 2 == 0


class Interleaved(nn.Module):
    """Experts of a user: weights transposed, gate and up in turn, as many as their own code says."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.num_experts = 4
        self.both = nn.Parameter(torch.randn(4, 24, 32) / 5)
        self.down = nn.Parameter(torch.randn(4, 16, 24) / 5)
        self.bias = nn.Parameter(torch.randn(4, 24)) if bias else None

    def forward(self, tokens: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for number in range(self.num_experts):
            rows, choice = torch.where(chosen == number)
            both = tokens[rows] @ self.both[number]
            made = (both[:, ::2].sigmoid() * both[:, 1::2]) @ self.down[number]
            made = made if self.bias is None else made + self.bias[number]
            out = out.index_add(0, rows, made * shares[rows, choice, None])
        return out


def routed(tokens: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(tokens, 24), torch.rand(tokens, 4).topk(2).indices, torch.rand(tokens, 2)


def test_experts_of_a_user_are_spread_and_sliced() -> None:
    torch.manual_seed(0)
    block, given = nn.Sequential(Interleaved()), [routed() for _ in range(2)]
    expected = [block[0](*one) for one in given]
    state = {name: value.clone() for name, value in block.state_dict().items()}

    def spread(group: ThreadGroup) -> Tensor:
        own = nn.Sequential(Interleaved())
        own.load_state_dict(state)
        shards = spread_experts(own, ThreadExchange(group))
        assert own[0].num_experts == 2
        for name, shard in shards.items():
            torch.testing.assert_close(gather_full(own.get_parameter(name).data, shard, group), state[name])
        made: Tensor = own[0](*given[group.rank])
        return made.detach()

    for made, wanted in zip(run_threads(2, spread), expected, strict=True):
        torch.testing.assert_close(made, wanted)
    (mixture,) = find_mixtures(block)
    found = find_slices(block, mixture, 24)
    assert isinstance(found, ExpertSlices)
    assert [(one.name, one.dim) for one in found.parameters] == [("both", 2), ("down", 1)]


def test_experts_with_biases_whose_choices_may_be_left_out_are_spread() -> None:
    config = transformers.GptOssConfig(**SHAPE, head_dim=8, num_local_experts=4, num_experts_per_tok=2)
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config)
    block = model.model.layers[0].mlp
    for parameter in block.experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    given = [torch.randn(1, 10, 32) for _ in range(2)]
    expected = [block(one)[0].detach() for one in given]

    def spread(group: ThreadGroup) -> Tensor:
        own = copy.deepcopy(block)
        shards = spread_experts(own, ThreadExchange(group))
        assert sorted(shards) == sorted(f"experts.{name}" for name, _ in block.experts.named_parameters())
        made: Tensor = own(given[group.rank])[0].detach()
        return made

    for made, wanted in zip(run_threads(2, spread), expected, strict=True):
        torch.testing.assert_close(made, wanted)


@pytest.mark.parametrize("shared", [False, True])
def test_slices_sum_up_forward_and_backward(shared: bool) -> None:
    torch.manual_seed(0)
    whole, every = Interleaved(), routed(8)
    hidden, index, weights = every[0].requires_grad_(), every[1], every[2].requires_grad_()
    expected = whole(hidden, index, weights)
    expected.square().sum().backward()

    def slices(group: ThreadGroup) -> tuple[Tensor, ...]:
        own, half = Interleaved(), slice(16 * group.rank, 16 * group.rank + 16)
        own.both.data = whole.both.data[:, :, half]
        own.down.data = whole.down.data[:, half.start // 2 : half.stop // 2]
        sum_slices(own, group, shared)
        rows = slice(4 * group.rank, 4 * group.rank + 4) if shared else slice(None)
        own_hidden, own_weights = (one.detach()[rows].clone().requires_grad_() for one in (hidden, weights))
        made = own(own_hidden, index[rows], own_weights)
        made.square().sum().backward()
        return made.detach(), own_hidden.grad, own_weights.grad, own.both.grad

    found, wanted = run_threads(2, slices), (expected, hidden.grad, weights.grad)
    for place in range(3):
        parts = [one[place] for one in found]
        for made in [torch.cat(parts)] if shared else parts:
            torch.testing.assert_close(made, wanted[place])
    torch.testing.assert_close(torch.cat([one[3] for one in found], 2), whole.both.grad)


def test_a_bias_behind_the_sum_cannot_be_sliced() -> None:
    block = nn.Sequential(Interleaved(bias=True))
    (mixture,) = find_mixtures(block)
    assert "add up" in str(find_slices(block, mixture, 24))


class Listed(nn.Module):
    """Experts that are modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        shares = self.router(tokens).softmax(-1)
        return sum(shares[..., i : i + 1] * one(tokens) for i, one in enumerate(self.experts))


def test_experts_in_a_list_are_reported_with_why_they_are_not_spread() -> None:
    block = nn.Sequential(Listed(), nn.Conv1d(4, 4, 3, bias=False))
    (mixture,) = find_mixtures(block)
    assert (mixture.path, mixture.experts) == ("0.experts", 3)
    assert "one by one; stack their weights" in mixture.reason
    with pytest.raises(InputError, match="Plan it with expert=1"):
        spread_experts(block, None, capacity=1.0)


def test_more_ways_than_experts_are_refused() -> None:
    block = nn.Sequential(Interleaved())

    def spread(group: ThreadGroup) -> str:
        with pytest.raises(InputError, match="Use a divisor of 4") as refused:
            spread_experts(block, ThreadExchange(group))
        return str(refused.value)

    assert all("experts" in message or "expert" in message for message in run_threads(3, spread))


def test_a_capacity_drops_what_is_beyond_on_one_rank_too() -> None:
    torch.manual_seed(0)
    config = MoEConfig(64, 1, 16, 4, 2, 16, experts=4, choices=1)
    mixture, tokens = ZooMixture(config), torch.randn(1, 12, 16)
    for parameter in mixture.parameters():
        nn.init.normal_(parameter)
    whole, block = mixture(tokens), nn.Sequential(mixture)
    index = mixture.router(tokens[0]).argmax(-1)
    spread_experts(block, None, capacity=1.0)
    early = torch.tensor([int((index[:place] == index[place]).sum()) < 3 for place in range(12)])
    assert not early.all()
    torch.testing.assert_close(block(tokens), whole * early[None, :, None])


def test_experts_called_otherwise_say_so() -> None:
    def forward(_: nn.Module, tokens: Tensor) -> Tensor:
        return tokens

    block = nn.Sequential(Interleaved())
    block[0].forward = partial(forward, block[0])
    assert "takes (tokens)" in find_mixtures(block)[0].reason


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
