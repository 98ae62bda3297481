"""Measured bytes against what autograd itself says it saves, and against sums by hand."""

from __future__ import annotations

from collections.abc import Set

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.tensor.regions import TensorPlan
from galvatron_lite.profiler.measure_layers import (
    block_memory,
    give_gradients,
    make_shard,
    measure_block,
)
from galvatron_lite.profiler.schema import LayerSetting
from galvatron_lite.profiler.segments import SegmentCall, copy_block, hidden_state, make_skeleton, record_calls
from galvatron_lite.profiler.timing import TimingRule
from tests.profiler.models import HIDDEN, TOKENS, gpt_layers, small_gpt, token_batch

CPU = torch.device("cpu")
QUICK = TimingRule(warmup=1, least=2, most=2, seconds=0.05)
ITEM = 4


def gpt_block(samples: int) -> tuple[nn.Module, SegmentCall]:
    model = small_gpt()
    block = copy_block(model, "blocks.0", CPU)
    skeleton = make_skeleton(model, gpt_layers(), CPU)
    return block, record_calls(skeleton, {"block": block}, token_batch(samples))["block"]


def saved_bytes(block: nn.Module, call: SegmentCall, shared: Set[int] = frozenset()) -> int:
    """Bytes of the storages autograd saves; parameters, and what all blocks share, left out."""
    storages: dict[int, int] = {}
    held = []
    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()} | shared

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    hidden = hidden_state(call.args, call.kwargs)
    inputs = hidden.clone().requires_grad_().clone()
    args, kwargs = map_tensors((call.args, call.kwargs), lambda tensor: inputs if tensor is hidden else tensor)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(*args, **kwargs)
    assert output.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("samples", [1, 4])
def test_kept_is_what_autograd_saves(samples: int) -> None:
    block, call = gpt_block(samples)
    give_gradients(block)
    assert block_memory(block, call, CPU).kept == saved_bytes(block, call)


def test_an_embedding_that_is_given_ids_alone_keeps_them() -> None:
    ids = torch.arange(12).reshape(4, 3)
    point = measure_block(nn.Embedding(12, HIDDEN), SegmentCall((ids,), {}, None), LayerSetting("words", 4), CPU, QUICK)
    assert point.kept == ids.nbytes
    assert min(point.forward, point.backward) > 0


def test_a_block_that_only_reshapes_ids_is_measured() -> None:
    call = SegmentCall((torch.zeros(4, 3, 2, dtype=torch.long),), {}, None)
    assert measure_block(nn.Flatten(), call, LayerSetting("flat", 4), CPU, QUICK).kept == 0


def test_transformers_blocks_are_recorded_and_measured() -> None:
    """A Llama block: keywords, a mask or none, rotations, a key-value cache that is left out."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from galvatron_lite.model.discover import discover_layers

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model, tokens = LlamaForCausalLM(config), token_batch(2)[0]
    layers = discover_layers(model)
    block = copy_block(model, "model.layers.0", CPU)
    batch = {"input_ids": tokens, "labels": tokens}
    call = record_calls(make_skeleton(model, layers, CPU), {"block": block}, batch)["block"]
    give_gradients(block)
    given = [hidden_state(call.args, call.kwargs), *(t for t in tensors_of((call.args, call.kwargs)))]
    shared = {tensor.untyped_storage().data_ptr() for tensor in given}
    assert block_memory(block, call, CPU).kept == saved_bytes(block, call, shared)


def test_a_linear_layer_by_hand() -> None:
    """Keeps its input; backward holds it, the output's gradient, then the input's gradient and the weight's."""
    rows, width, out = 8, 64, 32
    layer = nn.Linear(width, out, bias=False)
    give_gradients(layer)
    call = SegmentCall((torch.ones(rows, width),), {}, torch.empty(rows, out, device="meta"))
    memory = block_memory(layer, call, CPU)
    assert memory.kept == rows * width * ITEM
    seed = 2 * ITEM  # the scalar that ends the segment, and its gradient
    forward = (rows * width + rows * out) * ITEM
    backward = (rows * width + rows * out + rows * width + out * width) * ITEM
    assert forward <= memory.forward_working <= forward + seed
    assert backward <= memory.working <= backward + seed


def test_a_result_that_the_block_keeps_counts_with_the_next_one() -> None:
    """ReLU keeps its result, which is what the next block enters with; so blocks on end count each picture once."""
    ends, goes_on = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)
    call = SegmentCall((torch.randn(64, 4),), {}, torch.empty(64, 4, device="meta"))
    kept = [block_memory(block, call, CPU).kept for block in (ends, goes_on)]
    assert kept == [64 * 4 * 4, 64 * 4 * 4]


def test_full_recompute_keeps_the_input() -> None:
    block, call = gpt_block(4)
    memory = block_memory(
        make_shard(block, LayerSetting("block", 4, recompute=Recompute.FULL), TensorPlan(), CPU), call, CPU
    )
    random_state = torch.get_rng_state().nbytes
    assert memory.kept == 4 * TOKENS * HIDDEN * ITEM + random_state


def test_half_precision_computes_as_the_runtime_does() -> None:
    """Under autocast activations take half the bytes; the casts of the weights are kept too."""
    block, call = gpt_block(4)
    setting = LayerSetting("block", 4)
    half_call = SegmentCall(tuple(tensor.bfloat16() for tensor in call.args), {}, call.result)
    whole = block_memory(make_shard(block, setting, TensorPlan(), CPU), call, CPU).kept
    half = block_memory(make_shard(block, setting, TensorPlan(), CPU, "bf16"), half_call, CPU).kept
    matrices = sum(parameter.numel() for parameter in block.parameters() if parameter.dim() == 2)
    assert half < 0.75 * whole + 2 * matrices


def test_the_block_is_not_changed() -> None:
    block, call = gpt_block(2)
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    measure_block(block, call, LayerSetting("block", 2, 2, True, Recompute.FULL), CPU, QUICK)
    assert all(torch.equal(block.state_dict()[name], tensor) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in block.parameters())
