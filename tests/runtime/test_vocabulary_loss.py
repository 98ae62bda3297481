"""Models whose head is split over a vocabulary that no degree divides train like one process, with no whole logits."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.model.batch import call_model, loss_of
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.parallelism.vocabulary import logits
from galvatron_lite.runtime.engine import ParallelModel
from galvatron_lite.runtime.parameters.full_state import full_gradients
from tests.equivalence import families
from tests.equivalence.families import build_family, build_model
from tests.pool import WorkerPool
from tests.runtime.plans import make_plan

VOCAB, SAMPLES = 67, 4
NAMES = ("gpt2", "llama", "qwen2", "bert", "zoo-gpt")


def _logits_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output["logits"]


def _wrong(name: str, tensor: int, zero: int, microbatches: int) -> list[str]:
    """What differs from one process."""
    model, batch, layers = build_family(name, SAMPLES)
    loss = loss_of(call_model(model, batch), batch)
    loss.backward()
    loss = loss.detach()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    whole = _logits_of(call_model(model, batch)).detach()
    strategies = [[Strategy(zero=zero, tensor=tensor)] * len(layers)]
    plan = make_plan([[layer.name for layer in layers]], strategies, SAMPLES, microbatches)
    parallel = ParallelModel(build_model(name), plan, layers, batch, device="cpu")
    with patch.object(logits, "gather_last", side_effect=AssertionError("whole logits were made")):
        mine = parallel.backward_step(batch).detach()
    dist.all_reduce(mine)
    found = full_gradients(parallel)
    wrong = [] if abs(float(mine) - float(loss)) < 1e-5 else [f"{name}: loss {float(mine)}, not {float(loss)}"]
    wrong += [f"{name}: {key}" for key in wanted if not torch.allclose(found[key], wanted[key], rtol=1e-4, atol=1e-6)]
    outputs = _logits_of(parallel.outputs(batch))
    if whole.dim() and not (type(outputs) is Tensor and torch.allclose(outputs, whole, atol=1e-5)):
        wrong.append(f"{name}: outputs")
    return wrong


def compare(cases: list[tuple[str, int, int, int]]) -> list[str]:
    with patch.object(families, "VOCAB", VOCAB):
        return [one for case in cases for one in _wrong(*case)]


def test_families_train_like_one_process(pool: WorkerPool) -> None:
    assert pool.run(2, compare, cases=[(name, 2, 1, 1) for name in NAMES]) == [[]] * 2


def test_with_zero_and_microbatches(pool: WorkerPool) -> None:
    cases = [("gpt2", 4, 1, 2), ("bert", 2, 2, 2)]
    assert pool.run(4, compare, cases=cases) == [[]] * 4
