"""What plans are predicted to hold, against dry runs of the models themselves; and no false alarms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.api import plan as find
from galvatron_lite.api_plans import verify_plan
from galvatron_lite.capture.trace import trace
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.cost.step import device_memory
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.shapes import load_model
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.verify.conformance.volume import volume
from galvatron_lite.verify.dry.roles import named_for
from galvatron_lite.verify.dry.step import dry_run, subject_of
from galvatron_lite.verify.schema import RoleRun, Verdict
from galvatron_lite.verify.source import example_of, named_source
from scripts.verify_sampled import verify
from studies import kept_bytes
from tests.equivalence.plans import uniform_plan
from tests.equivalence.test_plans import sampled


def dry(name: str, priced: Plan) -> tuple[Plan, RoleRun]:
    """A dry run of the first rank of a plan for a model by name, and the plan with the model's names of layers."""
    parts = named_source(name).on_meta()
    batch = example_of(parts)
    named = named_for(priced, discover_layers(parts[0], batch))
    return named, dry_run(subject_of(parts[0], named, batch, loss_fn=parts[2]), named, 0)[0]


def test_what_a_later_layer_reads_is_there_while_a_layer_computes() -> None:
    """Up-sampling by interpolation does not keep its input, which the activation in place before it does."""
    name = "unet-bilinear"
    graph = load_model(name, precision="bf16")
    profile = estimate_profile(graph, load_cluster("h100", 1), precision="bf16", name=name)
    priced = evaluate(profile, replace(uniform_plan(graph, Strategy(), batch=2), precision="bf16"))
    _, run = dry(name, priced)
    memory = priced.stages[0].memory
    assert run.peak.total == pytest.approx(memory.tensors, rel=0.01)


SMALL = """
{source: a small Llama, arch: decoder, layers: 2, hidden: 512, heads: 8, kv_heads: 2, ffn_hidden: 1792, gated_mlp: true,
 activation: silu, norm: rmsnorm, biases: false, positions: rotary, vocab: 8192, tied_embeddings: false, seq_len: 256}
"""


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_zero_1_holds_two_four_and_a_share_of_twelve_bytes_an_item(tmp_path: Path, recompute: Recompute) -> None:
    """Of weights in bf16, float32 gradients, and float32 masters and moments, as Megatron-Core's optimizer does."""
    (path := tmp_path / "small.yaml").write_text(SMALL)
    name, zero1 = str(path), Strategy(zero=4, zero_stage=1)
    graph = load_model(name, precision="bf16")
    profile = estimate_profile(graph, load_cluster("h100", 4), precision="bf16", name="small")
    plan = uniform_plan(graph, replace(zero1, recompute=recompute), zero1, batch=8)
    priced = evaluate(profile, replace(plan, precision="bf16"))
    named, run = dry(name, priced)
    memory, items = priced.stages[0].memory, graph.trainable
    assert run.peak.total == pytest.approx(memory.tensors, rel=0.01)
    for held in (run.peak, memory):
        sizes = held.parameters / items, held.gradients / items, held.optimizer / items
        assert sizes == pytest.approx((2, 4, 12 / 4), rel=0.01)
    assert volume([run], named, profile).verdict is Verdict.PASSED


HIDDEN, BLOCKS = 256, 6


class Block(nn.Module):
    """An MLP whose input a module of all blocks scales."""

    def __init__(self, scale: nn.Module) -> None:
        super().__init__()
        self.scale, self.up, self.down = scale, nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.relu(self.up(self.scale(hidden))))


class Network(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(64, HIDDEN), nn.LayerNorm(HIDDEN)
        self.blocks = nn.ModuleList(Block(self.scale if shared else nn.LayerNorm(HIDDEN)) for _ in range(BLOCKS))
        self.head = nn.Linear(HIDDEN, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.scale(self.embed(tokens))
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_gathered_at_once_is_priced_at_once(shared: bool) -> None:
    """FSDP gathers a module that all blocks share, and so all of them, at once."""
    model, batch = Network(shared), torch.zeros(8, 16, dtype=torch.long)
    graph = trace(model, batch)
    profile = estimate_profile(graph, load_cluster("a100-80gb", 2), precision="fp32", name="shared")
    plan = find(profile, batch=8, fix=("zero=3", "dp=2", "pp=1", "microbatches=1"), forbid="recompute")
    report = verify_plan(plan, model, batch, checks="dry", profile=profile)
    (predicted,) = device_memory(plan)
    for run in report.roles:
        peak, expected = run.peak.tensors, predicted.tensors
        assert 0.9 <= peak / expected <= 1.01
    assert [check for check in report.checks if check.verdict is Verdict.FAILED] == []


MOST = 1.15


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("Llama", 1), ("GPT", 2), ("Mixtral", 2), ("transformers' Llama", 2), ("transformers' Mixtral", 2)],
)
def test_blocks_keep_no_more_than_they_must(name: str, tensor: int) -> None:
    """No more than Megatron-Core keeps for backward, and as much as priced."""
    sizes, make = kept_bytes.MODELS[name]
    small = replace(sizes, hidden=sizes.hidden // 16, ffn=sizes.ffn // 16, heads=4, kv_heads=2)
    if sizes.kv_heads == sizes.heads:
        small = replace(small, kv_heads=4)
    with patch.dict(kept_bytes.MODELS, {name: (small, make)}):
        for recompute in (Recompute.NONE, Recompute.SELECTIVE):
            theirs, seen, said = kept_bytes.compare(name, tensor, recompute)
            assert said == pytest.approx(seen, rel=0.01), recompute
            assert seen <= MOST * theirs, recompute


@pytest.mark.parametrize(("family", "seed"), [("plain", 0), ("zoo-llama", 1)])
def test_correct_plans_pass(family: str, seed: int) -> None:
    """Sampled plans that train like one process (``tests.equivalence``): unlike layouts side by side, stages that go
    round, parameters outside of layers."""
    (plan,) = sampled(family, 2, 1, seed)
    found = verify(family, plan)
    assert len(found) > 8
    assert [check for check in found if check.verdict is Verdict.FAILED] == []
