"""What is found in blocks not seen before, and what is refused."""

from __future__ import annotations

import copy
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite.model.zoo.llama import LlamaBlock, LlamaConfig
from galvatron_lite.parallelism.tensor.infer import infer_block, infer_edge
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from tests.parallelism.tensor_blocks import CASES, HIDDEN, TOKENS, hidden, make_case

DEGREES = {
    "zoo_gpt": (4, True, 2), "zoo_llama": (4, True, 2), "hf_llama": (4, True, 2), "hf_qwen2": (4, True, 2),
    "hf_qwen3": (4, True, 2), "hf_gpt2": (4, True, 2), "hf_bert": (4, True, 2), "hf_vit": (4, True, 2),
    "encoder": (64, False, 1), "fused_attention": (4, True, 1), "gated_mlp": (48, True, 1),
    "cross_attention": (4, False, 1), "adapted_llama": (4, True, 2), "adapted_hf_llama": (4, True, 2),
}  # fmt: skip


def plan_of(block: nn.Module, *args: Any) -> TensorPlan:
    return infer_block(block, args or (hidden(torch.float32),), {})


@pytest.mark.parametrize("name", CASES)
def test_families(name: str) -> None:
    case = make_case(name)
    plan = infer_block(case.block, case.args, case.kwargs)
    # the largest degree: key-value heads where there is attention, else the features of the MLP
    assert (plan.max_degree, plan.sequence_parallel, len(plan.regions)) == DEGREES[name]
    assert plan.collectives == 2 * len(plan.regions)


def test_the_block_is_left_alone() -> None:
    case = make_case("hf_gpt2")
    case.block.train()
    case.block.register_forward_hook(lambda *_: pytest.fail("the caller's hook ran"))
    state, random = copy.deepcopy(case.block.state_dict()), torch.get_rng_state()
    classes = [type(module) for module in case.block.modules()]
    infer_block(case.block, case.args, case.kwargs)
    torch.testing.assert_close(case.block.state_dict(), state, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert [type(module) for module in case.block.modules()] == classes
    assert case.block.training
    assert case.block.attn.split_size == HIDDEN  # type: ignore[union-attr]


def test_a_huge_block_takes_a_moment_and_no_memory() -> None:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(n_embd=12288, n_head=96)
    config._attn_implementation = "sdpa"
    started = time.process_time()
    with torch.device("meta"):
        plan = infer_block(GPT2Block(config, 0), (torch.empty(1, 2048, 12288), None), {"attention_mask": None})
    assert (plan.max_degree, plan.sequence_parallel) == (96, True)
    assert plan.regions[0].columns[0].parts == (12288,) * 3
    assert time.process_time() - started < 10


class Wrapped(nn.Module):
    """A pair of linears, with something done to what goes in, between, and out."""

    def __init__(self, inner: int = 64, **steps: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, inner), nn.Linear(inner, HIDDEN)
        self.extra = nn.Parameter(torch.ones(steps.pop("extra", 1)))
        self.steps = SimpleNamespace(**{"before": lambda x: x, "between": torch.tanh, "after": lambda x: x} | steps)

    def forward(self, state: Tensor) -> Any:
        inner = self.steps.between(self.up(self.steps.before(state)))
        return self.steps.after(state + self.down(inner * self.extra))


def test_what_couples_the_shares_is_refused() -> None:
    plan = plan_of(Wrapped(between=lambda x: functional.normalize(x, dim=-1)))
    assert plan.max_degree == 1
    assert "up → down cannot be split: the shares, run one by one, do not add up to the whole" in plan.reason
    assert plan.reason.endswith("therefore tensor parallelism is not offered for this block.")
    assert plan_of(Wrapped(between=lambda x: x.cumsum(-1))).max_degree == 1
    assert plan_of(Wrapped(extra=64)).max_degree == 1, "a parameter for each inner feature is not split"


def test_hooks_of_modules_inside_may_couple_the_shares() -> None:
    block = Wrapped()
    block.up.register_forward_hook(lambda _, args, output: functional.normalize(output, dim=-1))
    assert plan_of(block).max_degree == 1
    block = Wrapped()
    block.down.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    assert plan_of(block).max_degree > 1


def test_what_couples_tokens_is_split_but_not_by_tokens() -> None:
    for step in (
        lambda x: x - x.mean(1, keepdim=True),
        lambda x: x.flip(1),
        lambda x: x + torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(-1),
    ):
        for place in ("before", "after"):
            plan = plan_of(Wrapped(**{place: step}))
            assert (plan.max_degree, plan.sequence_parallel) == (64, False)
            assert "token by token" in plan.reason
    # inside the region every device has all tokens
    assert plan_of(Wrapped(between=lambda x: x.flip(1))).sequence_parallel


class OneHead(nn.Module):
    """Attention of one head among the tokens of a document: its scores need all features."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        scores = (query @ key.T).masked_fill(document[:, None] != document, -1e9)
        return self.out(scores.softmax(-1) @ value)


def test_integers_may_number_documents() -> None:
    state, document = (torch.empty(TOKENS, *more, device="meta") for more in ((HIDDEN,), ()))
    plan = plan_of(OneHead(), state, document.long())
    assert not plan.regions
    assert "qkv → out cannot be split" in plan.reason


class Timed(Wrapped):
    """A block with linears of its own for the time of a sample, as those of diffusion transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, HIDDEN)

    def forward(self, state: Tensor, time: Tensor | None = None) -> Any:
        shift = self.second(torch.tanh(self.first((time or torch.arange(8.0)).to(state.dtype))))
        return super().forward(state + shift)


def test_what_reads_no_hidden_state_is_split_too() -> None:
    plan = plan_of(Timed())
    assert {region.rows for region in plan.regions} == {("down",), ("second",)}
    assert (plan.max_degree, plan.sequence_parallel) == (32, False)


def test_results_used_elsewhere_are_refused() -> None:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)

        def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
            inner = self.up(state)
            return state + self.down(inner), inner

    plan = plan_of(Leaky())
    assert plan.max_degree == 1
    assert "also used elsewhere" in plan.reason


def test_a_weight_used_twice_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)

        def forward(self, state: Tensor) -> Tensor:
            result: Tensor = state + self.down(self.up(state).relu() + self.up(state * 2))
            return result

    assert "used more than once" in plan_of(Twice()).reason
    tied = Wrapped(inner=HIDDEN)
    tied.down.weight = tied.up.weight
    assert "used more than once" in plan_of(tied).reason


def test_three_heads_go_three_ways() -> None:
    class ThreeHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = 3
            self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
            self.up, self.down = nn.Linear(24, 96), nn.Linear(96, 24)

        def forward(self, state: Tensor) -> Tensor:
            # heads outermost: each has its own query, key and value next to one another
            q, k, v = self.qkv(state).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
            state = state + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            result: Tensor = state + self.down(self.up(state).relu())
            return result

    plan = plan_of(ThreeHeads(), torch.randn(2, TOKENS, 24))
    assert (plan.max_degree, len(plan.regions)) == (3, 2)


@pytest.mark.parametrize("block", [nn.LayerNorm(HIDDEN), nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU())])
def test_nothing_to_split(block: nn.Module) -> None:
    plan = plan_of(block)
    assert plan.max_degree == 1
    assert "therefore tensor parallelism is not offered for this block" in plan.reason


def test_a_block_that_cannot_run_says_why() -> None:
    def refuse(state: Tensor) -> Tensor:
        raise RuntimeError("needs a wrench")

    assert "RuntimeError: needs a wrench" in plan_of(Wrapped(before=refuse)).reason
    assert "not finite" in plan_of(Wrapped(after=lambda x: x / 0)).reason
    assert "no floating-point tensor" in plan_of(Wrapped(), torch.zeros(2, 3, dtype=torch.long)).reason


def test_a_block_that_needs_all_tokens_is_run_on_them() -> None:
    def only_12(state: Tensor) -> Tensor:
        return state.reshape(2, 12, HIDDEN)

    plan = plan_of(Wrapped(before=only_12), torch.randn(2, 12, HIDDEN))
    assert (plan.max_degree, plan.sequence_parallel) == (64, False)


@pytest.mark.parametrize("tokens", [64, 4096])
def test_as_many_tokens_as_features_and_tables_of_places_are_cut(tokens: int) -> None:
    config = LlamaConfig(vocab=8, layers=1, hidden=4096, heads=32, kv_heads=8, ffn_hidden=1024, sequence=tokens)
    with torch.device("meta"):
        block, state, places = LlamaBlock(config), torch.empty(1, tokens, 4096), torch.empty(tokens, 128)
    plan = infer_block(block, (state, places, places), {})
    assert (plan.max_degree, plan.sequence_parallel, len(plan.regions)) == (8, True, 2)


def test_edges() -> None:
    words, places = nn.Embedding(50257, 16), nn.Embedding(30, 16)
    plan = infer_edge({"wte": words, "wpe": places})
    assert (plan.embeddings, plan.heads, plan.collectives) == (("wte",), (), 2)
    # any degree will do, as 50257 is split unevenly; every divisor is at most the vocabulary
    assert all(plan.max_degree % degree == 0 for degree in (*range(1, 11), 16, 32, 64))
    assert plan.max_degree <= 50257
    head = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 50257))
    assert infer_edge({"cls": head}).heads == ("cls.1",)
    assert infer_edge({"norm": nn.LayerNorm(8)}).max_degree % 8 == 0
    assert "does all of its work" in infer_edge({"norm": nn.LayerNorm(8)}).reason


def test_weights_that_other_modules_share_stay_whole() -> None:
    class Scaled(nn.Linear):
        def forward(self, value: Tensor) -> Tensor:
            return super().forward(value) * 0.5

    words, head = nn.Embedding(100, 8), Scaled(8, 100, bias=False)
    head.weight = words.weight
    model = nn.ModuleList([words, head])
    assert infer_edge({"words": words}, model).embeddings == ()
    assert infer_edge({"head": head}, model).heads == ()
