"""What plans by name are predicted to hold, against a dry run of the model itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.shapes import load_model
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.verify.conformance.volume import volume
from galvatron_lite.verify.dry.roles import named_for
from galvatron_lite.verify.dry.step import dry_run, subject_of
from galvatron_lite.verify.schema import Verdict
from galvatron_lite.verify.source import example_of, named_source
from tests.equivalence.plans import uniform_plan


def test_what_a_later_layer_reads_is_there_while_a_layer_computes() -> None:
    """Up-sampling by interpolation does not keep its input, which the activation in place before it does."""
    name = "unet-bilinear"
    graph = load_model(name, precision="bf16")
    profile = estimate_profile(graph, load_cluster("h100", 1), precision="bf16", name=name)
    priced = evaluate(profile, replace(uniform_plan(graph, Strategy(), batch=2), precision="bf16"))
    parts = named_source(name).on_meta()
    batch = example_of(parts)
    named = named_for(priced, discover_layers(parts[0], batch))
    run, _ = dry_run(subject_of(parts[0], named, batch, loss_fn=parts[2]), named, 0)
    memory = priced.stages[0].memory
    assert run.peak.total == pytest.approx(memory.total - memory.context, rel=0.01)


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
    model, _, loss_fn = named_source(name).on_meta()
    batch = example_of((model, None, loss_fn))
    named = named_for(priced, discover_layers(model, batch))
    run, _ = dry_run(subject_of(model, named, batch, loss_fn=loss_fn), named, 0)
    memory, items = priced.stages[0].memory, graph.trainable
    assert run.peak.total == pytest.approx(memory.total - memory.context, rel=0.01)
    for held in (run.peak, memory):
        sizes = held.parameters / items, held.gradients / items, held.optimizer / items
        assert sizes == pytest.approx((2, 4, 12 / 4), rel=0.01)
    assert volume([run], named, profile).verdict is Verdict.PASSED
