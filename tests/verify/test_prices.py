"""What plans by name are predicted to hold, against a dry run of the model itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.shapes import load_model
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.verify.dry.roles import named_for
from galvatron_lite.verify.dry.step import dry_run, subject_of
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
