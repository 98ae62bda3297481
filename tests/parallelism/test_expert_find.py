"""Where experts are found, how they are sliced, and what a rank keeps of them."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import transformers
from torch import Tensor, nn

from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import InputError
from galvatron_lite.model.zoo import build
from galvatron_lite.model.zoo.moe import Mixture as ZooMixture
from galvatron_lite.model.zoo.moe import MoEConfig
from galvatron_lite.parallelism.expert.apply import find_slices, spread_experts, sum_slices
from galvatron_lite.parallelism.expert.find import find_mixtures
from galvatron_lite.parallelism.tensor.regions import ExpertSlices
from tests.parallelism.sharded_compare import gather_full
from tests.parallelism.test_expert_dispatch import ThreadExchange
from tests.parallelism.thread_group import ThreadGroup, run_threads

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


def test_experts_in_a_list_are_told_why_they_are_not_spread() -> None:
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
