"""What one device keeps: bytes saved for backward passes, and versions of parameters."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from galvatron_lite.runtime.cyclic.setup import CyclicOptions, CyclicRuntime, set_up
from tests.parallelism.cyclic.fleet import CPU, SGD, MemoryMailbox, Post
from tests.parallelism.cyclic.models import Case, blocks_case, deep_case, make_batches, make_plan, split

ROWS, WIDTH, STEPS = 50, 8, 3  # no size of a parameter is ROWS


class Kept:
    """A saved tensor; gone, it is taken off the ledger."""

    def __init__(self, tensor: Tensor, ledger: Ledger) -> None:
        self.tensor, self._ledger, self._place = tensor, ledger, tensor.data_ptr()

    def __del__(self) -> None:
        self._ledger.holders[self._place] -= 1


class Ledger:
    """Bytes of activations that autograd keeps, each tensor once."""

    def __init__(self, rows: int) -> None:
        self.holders: Counter[int] = Counter()
        self.sizes: dict[int, int] = {}
        self.peak, self._rows = 0, rows

    def pack(self, tensor: Tensor) -> Any:
        if not tensor.dim() or tensor.shape[0] != self._rows:
            return tensor  # a parameter
        self.sizes[tensor.data_ptr()] = tensor.nbytes
        self.holders[tensor.data_ptr()] += 1
        self.peak = max(self.peak, self.bytes)
        return Kept(tensor, self)

    @property
    def bytes(self) -> int:
        return sum(self.sizes[place] for place, count in self.holders.items() if count > 0)

    def watch(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, lambda kept: kept.tensor if isinstance(kept, Kept) else kept)


def data_parallel_peak(model: nn.Module, microbatches: list[Any]) -> int:
    """Of all micro-batches at once."""
    ledger = Ledger(ROWS)
    with ledger.watch():
        losses = [model(**one) for one in microbatches]
        assert len(losses) == len(microbatches)
        return ledger.peak


def runtime_of(case: Case, rule: str, early_release: bool = False) -> CyclicRuntime:
    model, layers, stages = case
    plan = make_plan(stages, rule, "single", ROWS)
    options = CyclicOptions(CPU, early_release=early_release)
    runtime = set_up(copy.deepcopy(model), plan, layers, None, 0, MemoryMailbox(Post()), options)
    for states in runtime.executor.states.values():
        states.make_optimizer(SGD, None)
    return runtime


def cyclic_peak(case: Case, batches: list[Any], rule: str, early_release: bool = False) -> int:
    ledger, runtime = Ledger(ROWS), runtime_of(case, rule, early_release)
    executor = runtime.executor
    with ledger.watch():
        for step, batch in enumerate(batches):
            executor.feed(step, split(batch, len(case[2])))
            executor.run(executor.programme.passes(0, step))
        executor.drain(len(batches))
    assert ledger.bytes == 0
    return ledger.peak


@pytest.mark.parametrize(("count", "rule"), [(2, "cdp-v1"), (2, "cdp-v2"), (3, "cdp-v2"), (4, "cdp-v1"), (8, "cdp-v2")])
def test_activations_of_equal_stages(count: int, rule: str) -> None:
    """(N+1)/(2N) of data parallelism's; with early release (N*N/2 + 1) / (N*N) of them."""
    torch.manual_seed(0)
    case, batches = deep_case(count, WIDTH), make_batches(STEPS, count, ROWS, WIDTH)
    whole = data_parallel_peak(case[0], split(batches[0], count))
    assert cyclic_peak(case, batches, rule) / whole == pytest.approx((count + 1) / (2 * count), rel=0.05)
    early = (count * count // 2 + 1) / (count * count)
    assert cyclic_peak(case, batches, rule, early_release=True) / whole <= early * 1.05


@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
def test_versions_are_let_go(rule: str) -> None:
    """Two at most, and one only of the last stage under v2, where nobody is late."""
    count = 4
    runtime, batches = runtime_of(blocks_case(count), rule), make_batches(4, count, ROWS)
    executor, held = runtime.executor, dict.fromkeys(range(count), 0)
    for step, batch in enumerate(batches):
        executor.feed(step, split(batch, count))
        for one in executor.programme.passes(0, step):
            executor.run([one])
            for stage, states in executor.states.items():
                graphs = {flight.version for place, flight in executor.desk.flights.items() if place[0] == stage}
                held[stage] = max(held[stage], len(graphs.union(states.versions)))
    assert held == {0: 2, 1: 2, 2: 2, 3: 1 if rule == "cdp-v2" else 2}
