"""Layers that share tokens (ring attention, Ulysses) train like one process, and hold as little as predicted."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.plan import evaluate
from galvatron_lite.cost.step import device_memory
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Recompute
from galvatron_lite.model.zoo import build
from galvatron_lite.parallelism.context.rules import RING_RULES
from galvatron_lite.parallelism.sharded.collectives import full_tensor
from galvatron_lite.parallelism.sharded.groups import MirroredGroup, ProcessAxisGroup
from galvatron_lite.parallelism.sharded.tensor import ShardSpec, from_local
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.measure import measure_profile
from galvatron_lite.profiler.memory import track_peak
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.timing import TimingRule
from galvatron_lite.runtime.engine import ParallelModel
from tests.equivalence.plans import uniform_plan, write_plan
from tests.equivalence.training import SAMPLES, make_case, train_alone, train_under_plans
from tests.pool import WorkerPool

RING, ULYSSES = Strategy(data=2, context=2), Strategy(data=2, context=2, ulysses=True)
SHARED = Strategy(zero=2, zero_stage=3, context=2, recompute=Recompute.SELECTIVE)
MATMULS = Strategy(context=2, tensor=2, sequence_parallel=True)
ALONE = Strategy(context=4, zero_stage=2, recompute=Recompute.FULL)
EDGES = (
    Strategy(data=2, context=2), Strategy(context=2, tensor=2), Strategy(data=4), Strategy(context=4), Strategy(data=4),
)  # fmt: skip


def one_stage(names: list[str], edge: Strategy, blocks: tuple[Strategy, ...]) -> Plan:
    """Strategies go round the blocks; embedding and head are treated alike, as they may share weights."""
    inner = {name: blocks[place % len(blocks)] for place, name in enumerate(names)}
    chosen = {**inner, names[0]: edge, names[-1]: edge}
    return write_plan([names], chosen, devices=4, batch=SAMPLES, microbatches=2)


def two_stages(names: list[str], strategies: tuple[Strategy, ...]) -> Plan:
    chosen = {name: strategies[place % len(strategies)] for place, name in enumerate(names)}
    chosen[names[-1]] = chosen[names[0]]
    return write_plan([names[:3], names[3:]], chosen, devices=4, batch=SAMPLES, microbatches=2)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_plans_that_share_tokens(pool: WorkerPool, family: str) -> None:
    """With data, ZeRO, tensor and recompute beside them, next to layers that share samples, and in pipelines."""
    case = make_case(family)
    names = [layer.name for layer in case.layers]
    blocks = [
        (RING, MATMULS, Strategy(data=4)),
        (ULYSSES, SHARED),
        (MATMULS, ALONE, RING),
        (Strategy(data=2, tensor=2, recompute=Recompute.SELECTIVE), ALONE),
        (replace(MATMULS, recompute=Recompute.SELECTIVE), Strategy(data=4)),
    ]
    plans = [one_stage(names, edge, several) for edge, several in zip(EDGES, blocks, strict=True)]
    plans.append(two_stages(names, (Strategy(context=2), Strategy(data=2), Strategy(context=2, ulysses=True))))
    if family == "bert":  # ring, Ulysses and all beside them; sampled plans have the pairs that are left out
        plans = plans[::2]
    results = pool.run(4, train_under_plans, case=case, plans=plans, reference=train_alone(family))
    assert [wrong for rank in results for wrong in rank] == []


ROWS, TOKENS = 2, 256
ONCE = TimingRule(warmup=0, least=1, most=1, seconds=0.0)


def make() -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = build("llama-tiny", vocab=128, layers=2, hidden=64, heads=4, kv_heads=2, ffn_hidden=128, sequence=TOKENS)
    return model, model.example_batch(ROWS)  # type: ignore[operator]


_WAIT = dist.Work.wait


def _wait(work: dist.Work, *args: Any) -> Any:
    """Waits until gloo's thread lets go of a message, too: ``track_peak`` does not see what other threads release."""
    done = _WAIT(work, *args)
    time.sleep(0.005)
    return done


def peak(plan: Plan) -> int:
    """Bytes at the worst moment of this process's third step."""
    gc.collect()
    with patch.object(dist.Work, "wait", _wait), track_peak("cpu") as tracked:
        model, batch = make()
        parallel = ParallelModel(model, plan, discover_layers(model, batch), batch, device="cpu")
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
        for _ in range(2):
            parallel.train_step(batch, optimizer)
        tracked.mark()
        parallel.train_step(batch, optimizer)
    return tracked.phases[-1].peak


def predicted(profile: Profile, plan: Plan) -> int:
    """Bytes, from the memory that was measured of layers, on as many devices as the plan takes."""
    cluster = load_cluster("v100", plan.devices)
    sheet = estimate_profile(profile.graph, cluster, precision="fp32", name="x", samples=(1,))
    (memory,) = device_memory(evaluate(replace(sheet, layers=profile.layers), plan))
    return memory.total - memory.context


def profile_of(folder: Path) -> Profile:
    """What one process measures; only the bytes are used."""
    model, batch = make()
    return measure_profile(model, batch, folder=folder, device="cpu", rule=ONCE)


def test_memory_falls_as_predicted(pool: WorkerPool, tmp_path: Path) -> None:
    profile, peaks = profile_of(tmp_path), []
    for block in (Strategy(), Strategy(context=2), Strategy(context=2, ulysses=True)):
        plan = uniform_plan(profile.graph, block, block, batch=ROWS)
        peaks.append(max(pool.run(block.devices, peak, plan=plan)))
        assert predicted(profile, plan) == pytest.approx(peaks[-1], rel=0.10)
    assert max(peaks[1:]) < 0.65 * peaks[0]


def attention_peaks() -> tuple[int, int]:
    """Bytes of attention forward and backward: by a ring, and with gathered keys and values."""
    line, tokens, found = MirroredGroup(ProcessAxisGroup(dist.group.WORLD)), 2048, list[int]()
    for ways in (1, 0):
        with track_peak("cpu") as tracked:
            leaves = [torch.ones(1, 2, tokens // line.size, 16).requires_grad_() for _ in range(3)]
            shares = [from_local(leaf.view_as(leaf), (ShardSpec(2, tokens, line),), RING_RULES) for leaf in leaves]
            keys = shares[1:] if ways else [full_tensor(share) for share in shares[1:]]
            scaled_dot_product_attention(shares[0], *keys).sum().backward()
        found.append(tracked.phases[-1].peak)
    return found[0], found[1]


def test_a_ring_holds_less_than_all_keys(pool: WorkerPool) -> None:
    for ring, gathered in pool.run(8, attention_peaks):
        assert ring < 0.6 * gathered, (ring, gathered)
