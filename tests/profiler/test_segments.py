"""Taking a model apart leaves the model whole, and its parts do what they did inside it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.errors import TraceError
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.profiler.segments import (
    copy_block,
    hidden_state,
    make_skeleton,
    materialise,
    record_calls,
)
from tests.pool import WorkerPool
from tests.profiler.models import LAYERS, TupleModel, gpt_layers, small_gpt, token_batch, tuple_layers

CPU = torch.device("cpu")


def test_the_users_model_is_not_changed() -> None:
    model = small_gpt()
    before = copy.deepcopy(model.state_dict())
    parts = list(model.modules())
    skeleton = make_skeleton(model, gpt_layers(), CPU)
    assert all(ours is theirs for ours, theirs in zip(model.modules(), parts, strict=True))
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert len(skeleton.stubs) == LAYERS
    assert sum(p.numel() for p in skeleton.model.parameters()) < sum(p.numel() for p in model.parameters())


def test_recorded_call_is_the_real_one() -> None:
    model, batch = small_gpt(), token_batch(2)
    seen: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    model(*batch)
    skeleton = make_skeleton(model, gpt_layers(), CPU)
    calls = record_calls(skeleton, {"block": copy_block(model, "blocks.0", CPU)}, batch)
    torch.testing.assert_close(hidden_state(calls["block"].args, calls["block"].kwargs), seen[0])
    assert calls["block"].result.shape == seen[0].shape


def test_tuples_attributes_and_keywords_pass_through() -> None:
    model, batch = TupleModel(), torch.ones(3, 4)
    skeleton = make_skeleton(model, tuple_layers(), CPU)
    calls = record_calls(skeleton, {"block": copy_block(model, "blocks.0", CPU)}, batch)
    assert set(calls["block"].kwargs) == {"shift"}
    assert calls["block"].result[1] is None
    skeleton.visit_with(lambda stub, args, kwargs: (args[0], None))
    expected = model.last(4 * model.first(batch)).square().mean()
    torch.testing.assert_close(skeleton.model(batch), expected)


def test_a_copy_on_meta_gets_usable_values_and_keeps_ties() -> None:
    with torch.device("meta"):
        model = small_gpt()
    skeleton = make_skeleton(model, gpt_layers(), CPU)
    assert skeleton.model.head.weight is skeleton.model.embed.weight
    assert all(not p.is_meta and p.isfinite().all() for p in skeleton.model.parameters())
    assert next(model.parameters()).is_meta


def test_buffers_from_meta_are_safe() -> None:
    with torch.device("meta"):
        module = nn.Module()
        module.register_buffer("position_ids", torch.zeros(1, 5, dtype=torch.long))
        module.register_buffer("allowed", torch.zeros(2, 2, dtype=torch.bool))
        module.register_buffer("angles", torch.zeros(3))
    materialise(module, CPU)
    assert module.position_ids.tolist() == [[0, 1, 2, 3, 4]]
    assert module.allowed.all()
    assert not module.angles.any()


def test_blocks_that_never_run_are_named() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2)])

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs.sum()

    model = Lazy()
    skeleton = make_skeleton(model, (Layer("blocks.0", "block", Role.BLOCK, ("blocks.0",)),), CPU)
    with pytest.raises(TraceError, match="without calling"):
        record_calls(skeleton, {"block": copy_block(model, "blocks.0", CPU)}, torch.ones(1, 2))


def test_a_key_value_cache_is_left_out() -> None:
    class Cache:
        def get_seq_length(self) -> int:
            return 0

        def update(self) -> None:
            raise AssertionError("would grow")

    class Cached(nn.Module):
        def forward(self, hidden: Tensor, cache: Cache | None = None) -> Tensor:
            if cache is not None:
                cache.update()
            return hidden

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Cached()])

        def forward(self, inputs: Tensor) -> Tensor:
            return self.blocks[0](inputs, cache=Cache()).sum()

    model = Model()
    skeleton = make_skeleton(model, (Layer("blocks.0", "block", Role.BLOCK, ("blocks.0",)),), CPU)
    calls = record_calls(skeleton, {"block": copy_block(model, "blocks.0", CPU)}, torch.ones(1, 2))
    assert calls["block"].kwargs == {"cache": None}


def normalise_a_copy() -> float:
    """Of a block whose norms ask other ranks; in a launched world."""
    block = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4))
    return float(copy_block(nn.ModuleDict({"block": block}), "block", CPU)(torch.randn(2, 3, 4, 4)).mean())


def test_norms_of_all_ranks_are_measured_alone(pool: WorkerPool) -> None:
    assert pool.run(2, normalise_a_copy) == pytest.approx([0.0, 0.0], abs=1e-5)
