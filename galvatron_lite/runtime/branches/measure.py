"""What a call of a branch with devices of its own costs the host, by training two of next to no work."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.cluster.cluster import Collective
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import DEFAULT_SCHEDULE, PLAN_VERSION, BranchPlacement, LayerRun, Plan, Stage
from galvatron_lite.profiler.measure_hardware import prepare
from galvatron_lite.profiler.timing import Across, Term, TimingRule, single_part, time_difference
from galvatron_lite.runtime.branches.engine import BranchedModel

_NAMES = ("first", "second")
_WIDTH = 8
_BYTES = 4


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(_WIDTH, _WIDTH) for _ in _NAMES)

    def forward(self, hidden: Tensor) -> Tensor:
        """A loss."""
        joined: Tensor = self.first(hidden) + self.second(hidden)
        return joined.mean()


def branch_seconds(device: torch.device, rule: TimingRule) -> float:
    """Host seconds of a call of a branch, forward and backward, beside the branch's work and the transfers.

    Two branches are on the first two ranks; every rank calls both. What they take in one process and two messages each
    are taken off. No call is free: a figure that does not stand out of the noise of its timing is given as that noise.
    All ranks call it together; there are two at least.
    """
    batch = {"hidden": torch.ones(1, _WIDTH, device=device)}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        layers = [Layer(name, "branch", Role.BLOCK, (name,)) for name in _NAMES]
        apart = BranchedModel(_Pair(), _plan(dist.get_world_size()), layers, batch, device=device)
        alone = _Pair().to(device)
    size = _WIDTH * _BYTES
    message = prepare(Collective.SEND_RECV, size, None, device)
    terms = (
        Term(1.0, single_part(lambda: apart.backward_step(batch)), Across.MAX),
        Term(-1.0, single_part(lambda: alone(**batch).backward()), Across.MAX),
        Term(-2.0 * len(_NAMES), single_part(message), Across.MAX),
    )
    found = time_difference(terms, device, rule)
    return max(found.seconds, found.noise) / len(_NAMES)


def _plan(devices: int) -> Plan:
    placed = tuple(
        BranchPlacement(name, (name,), number, 1, (LayerRun(name, name, 1, Strategy()),))
        for number, name in enumerate(_NAMES)
    )
    return Plan(PLAN_VERSION, "pair", devices, 1, 1, DEFAULT_SCHEDULE, "fp32", (Stage(()),), branches=placed)
