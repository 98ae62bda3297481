"""Every family is captured; its counts agree with the model's own."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from galvatron_lite import api
from galvatron_lite.capture.trace import trace
from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import LayerKind, ModelGraph, Recompute
from galvatron_lite.model.trace.run import gives_loss, mean_of_outputs
from galvatron_lite.model.zoo import build
from galvatron_lite.model.zoo.gpt import random_tokens
from galvatron_lite.search.space import strategies_for
from tests.model.forks import MODELS
from tests.model.models import FAMILIES, FFN, HEADS, HIDDEN, LAYERS, TOKENS, VOCAB, Mixer, Plain, hugging_face, plain
from tests.model.models import captured as captured_graph


@pytest.fixture(scope="module", params=FAMILIES)
def captured(request: pytest.FixtureRequest) -> tuple[str, nn.Module, ModelGraph]:
    model, _ = FAMILIES[request.param]()
    return request.param, model, captured_graph(request.param)


def test_parameters_are_those_of_the_model(captured: tuple[str, nn.Module, ModelGraph]) -> None:
    name, model, graph = captured
    assert graph.parameters == sum(parameter.numel() for parameter in model.parameters())
    if name.startswith("hf"):
        assert graph.parameters == model.num_parameters()


def test_equal_blocks_share_a_kind(captured: tuple[str, nn.Module, ModelGraph]) -> None:
    graph = captured[2]
    assert [layer.kind for layer in graph.layers] == ["before", *["block"] * LAYERS, "after"]
    assert list(graph.kinds) == ["before", "block", "after"]
    assert graph.tensors == ()  # a chain


def test_tied_parameters_are_counted_once(captured: tuple[str, nn.Module, ModelGraph]) -> None:
    name, _, graph = captured
    tied = name in ("gpt", "hf-gpt2", "hf-qwen2", "hf-bert")
    assert [(tie.first, tie.second, tie.parameters) for tie in graph.ties] == [
        ("before", "after", VOCAB * HIDDEN)
    ] * tied


def test_outputs_of_layers_are_inputs_of_the_next(captured: tuple[str, nn.Module, ModelGraph]) -> None:
    graph = captured[2]
    kinds = [graph.kind_of(layer) for layer in graph.layers]
    assert all(one.output_bytes == other.input_bytes > 0 for one, other in pairwise(kinds))


def test_every_recompute_choice_keeps_less_than_the_one_before(captured: tuple[str, nn.Module, ModelGraph]) -> None:
    block = captured[2].kinds["block"]
    none, selective, full = (block.kept[choice].total for choice in Recompute)
    assert full == block.input_bytes
    assert full < selective
    assert captured[0] == "plain" or selective < none
    assert all(set(captured[2].kinds[edge].kept) == {Recompute.NONE} for edge in ("before", "after"))


def test_dims_of_a_block(captured: tuple[str, nn.Module, ModelGraph]) -> None:
    name, _, graph = captured
    dims = graph.kinds["block"].dims
    if name == "plain":
        assert (dims.in_channels, dims.out_channels, dims.heads) == (HIDDEN, HIDDEN, 0)
        return
    kv_heads = 2 if "llama" in name or "qwen" in name else HEADS
    ffn = 4 * HIDDEN if name in ("gpt", "hf-gpt2") else FFN
    assert (dims.heads, dims.kv_heads, dims.hidden, dims.ffn_hidden) == (HEADS, kv_heads, HIDDEN, ffn)
    assert dims.sequence == graph.sequence == (17 if name == "hf-vit" else TOKENS)


def test_the_batch_size_of_the_example_does_not_matter() -> None:
    model = Plain()
    graphs = [trace(model, (torch.zeros(n, 3, TOKENS), torch.zeros(n, dtype=torch.long))) for n in (1, 2, 7)]
    assert graphs[0] == graphs[1] == graphs[2]


def test_models_on_meta_and_on_a_device_give_the_same_graph() -> None:
    with torch.device("meta"):
        meta, _ = hugging_face("Llama")
    assert captured_graph("hf-llama") == trace(meta, hugging_face("Llama")[1], name="hf-llama")


def test_the_model_is_left_as_it_was() -> None:
    model, batch = hugging_face("Llama")
    model.eval()
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    trace(model, batch)
    assert not model.training
    assert model.config.use_cache
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for name, value in model.state_dict().items():
        assert value.data_ptr() == before[name][0]
        assert torch.equal(value, before[name][1])


def test_a_mask_without_padding_changes_no_operator() -> None:
    model, batch = hugging_face("Llama")
    masked = trace(model, {**batch, "attention_mask": torch.ones(2, TOKENS)})
    assert masked.kinds["block"] == captured_graph("hf-llama").kinds["block"]


def test_the_models_own_checkpointing_is_left_out() -> None:
    model, batch = hugging_face("Llama")
    for layer in model.model.layers:
        layer.gradient_checkpointing = True
    assert trace(model, batch, name="hf-llama") == captured_graph("hf-llama")


class Recomputing(Mixer):
    """A user's block that calls torch.utils.checkpoint itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


def test_checkpoints_inside_a_users_block_are_left_to_the_plan() -> None:
    model, batch = plain()
    wanted = captured_graph("plain").kinds["block"]
    for place in range(LAYERS):
        model.body[place] = Recomputing(HIDDEN)
    block = trace(model, batch).kinds["block"]
    assert (block.kept, block.flops, block.backward_flops) == (wanted.kept, wanted.flops, wanted.backward_flops)


def heavy_flops(kind: LayerKind) -> int:
    return sum(operator.flops for operator in kind.operators)


def test_precision_halves_bytes_and_leaves_flops() -> None:
    model, batch = FAMILIES["gpt"]()
    single, half = captured_graph("gpt"), trace(model, batch, precision="bf16")
    assert (single.precision, half.precision) == ("fp32", "bf16")
    assert single.flops == half.flops
    assert single.kinds["block"].output_bytes == 2 * half.kinds["block"].output_bytes
    assert trace(model.to(torch.bfloat16), batch) == half


def test_frozen_parameters_get_no_backward_flops() -> None:
    model, batch = plain()
    for block in model.body:
        block.requires_grad_(False)
    graph = trace(model, batch)
    block = graph.kinds["block"]
    assert block.backward_flops == block.flops
    assert graph.dead == ()


def test_a_sequential_without_repeated_blocks() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    graph = trace(model, torch.zeros(3, 8), loss_fn=lambda output, _: output.square().mean())
    assert [layer.name for layer in graph.layers] == ["before", "0", "1", "2", "after"]
    assert [graph.kind_of(layer).parameters.total for layer in graph.layers] == [0, 36, 0, 10, 0]
    assert [heavy_flops(graph.kind_of(layer)) for layer in graph.layers] == [0, 64, 0, 16, 0]


def test_a_model_without_blocks_is_one_layer() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x)).mean()

    graph = trace(Two(), torch.zeros(3, 8))
    assert [layer.name for layer in graph.layers] == ["before", "after"]
    assert graph.kinds["before"].parameters.total == graph.parameters == 41
    assert heavy_flops(graph.kinds["before"]) == 2 * (8 * 4 + 4)
    assert graph.kinds["before"].backward_flops > 0


class OverTokens(nn.Module):
    """A block whose batch norm takes tokens for channels, as mixers of time series have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(TOKENS), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


def test_tokens_that_are_channels_stay_together() -> None:
    blocks = [OverTokens() for _ in range(3)]
    model = nn.Sequential(nn.Embedding(VOCAB, HIDDEN), *blocks, nn.Linear(HIDDEN, 1), nn.Flatten(0))
    graph = trace(model, torch.randint(VOCAB, (4, TOKENS)), loss_fn=lambda output, _: output.mean())
    kind = graph.kind_of(graph.layers[1])
    assert "norm takes statistics of each token" in kind.context_reason
    assert {one.context for one in strategies_for(kind, 2)} == {1}


class SharedHead(nn.Module):
    """Its head has the embedding's weights, and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("backend", ["galvatron", "deepspeed"])
def test_zero_shards_what_layers_share_that_have_nothing_else(backend: str) -> None:
    """As their group has one strategy, the embedding was never sharded."""
    graph = trace(SharedHead(), (torch.randint(VOCAB, (4, TOKENS)), torch.randint(VOCAB, (4, TOKENS))))
    after = graph.kind_of(graph.layers[-1])
    assert (after.parameters.total, after.shares, graph.kind_of(graph.layers[1]).shares) == (0, True, False)
    asked = {"model": graph, "cluster": "a100-40gb", "gpus": 2, "batch": 4, "runners_up": 0}
    plan = api.plan(fix=["pp=1", "zero=3"], backend=backend, **asked)  # type: ignore[arg-type]
    assert {run.strategy.zero_stage for run in plan.stages[0].runs} == {3}


class Leaving:
    """What runs an operator as it goes, as engines of training do that are given up."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        torch.ones(3).add_(1)


def test_garbage_collected_meanwhile_is_not_recorded() -> None:
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


SCRIPT = """
import resource, time, torch
import transformers
from galvatron_lite.capture.trace import trace

def held():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

start, before = time.process_time(), held()
with torch.device("meta"):
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        intermediate_size=28672)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.empty(1, 4096, dtype=torch.long)
graph = trace(model, {"input_ids": ids, "labels": ids}, precision="bf16")
print(time.process_time() - start, held() - before, graph.parameters, len(graph.layers), graph.kinds["block"].flops)
"""


@pytest.mark.study
def test_llama_70b_on_meta() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=280)
    seconds, grown, parameters, layers, flops = map(float, done.stdout.split())
    assert seconds < 30
    assert grown < 2e9
    assert parameters == 68_976_648_192
    assert layers == 82
    matmul = 2 * 4096 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    assert flops == matmul + 4 * 4096**2 * 8192


def test_whether_a_model_gives_its_loss() -> None:
    assert gives_loss(*plain())
    assert not gives_loss(*MODELS["pair"]())
    assert not gives_loss(*MODELS["heads"]())


def test_all_that_a_model_gives_stands_in_for_a_loss() -> None:
    output = {"a": torch.tensor([1.0, 3.0]), "b": (torch.tensor([[5.0]]), torch.tensor([7]))}
    assert mean_of_outputs(output) == 2.0 + 5.0
    with pytest.raises(InputError, match="floating"):
        mean_of_outputs(torch.tensor([1]))


def test_a_loss_may_hold_tensors_on_the_cpu() -> None:
    """Weights of classes are the user's; the model runs on the meta device while it is traced."""
    weighted = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    batch = (torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
    found = [
        trace(model, batch, loss_fn=lambda output, batch, loss=loss: loss(output, batch[1])).flops
        for loss in (torch.nn.functional.cross_entropy, weighted)
    ]
    assert found[0] == found[1]


class OnTokens(nn.Module):
    """A block that does something to what its linear layer gives."""

    def __init__(self, does: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(HIDDEN, HIDDEN), does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(x)
        more = self.does(made)
        return x + made + (more if isinstance(more, torch.Tensor) and more.shape == made.shape else 0)


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        (lambda x: x[:, 0].zero_(), "zero_"),
        (lambda x: x.__setitem__(x > 1, 1.0), "__setitem__"),
        (lambda x: torch.vmap(torch.cumsum, (0, None))(x, 0), "torch.func"),
        (lambda x: x.__setitem__((slice(None), 0), 1.0), ""),
        (lambda x: x[:, 1:].mul_(2), ""),
        (lambda x: x.register_hook(lambda gradient: gradient / 2), ""),
    ],
)
def test_what_cannot_run_on_shares_of_the_tokens_keeps_them_together(
    does: Callable[[torch.Tensor], Any], reason: str
) -> None:
    blocks = [OnTokens(does) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(VOCAB, HIDDEN), *blocks, nn.Linear(HIDDEN, 1), nn.Flatten(0))
    graph = trace(model, torch.randint(VOCAB, (4, TOKENS)), loss_fn=lambda output, _: output.mean())
    assert graph.kind_of(graph.layers[1]).context_reason.startswith(f"{reason} " if reason else "")
    assert bool(reason) == (not any(one.context > 1 for one in strategies_for(graph.kind_of(graph.layers[1]), 2)))
