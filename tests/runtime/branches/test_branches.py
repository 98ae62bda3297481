"""Training with branches on ranks of their own equals one process: loss, gradients, the state after three steps."""

from __future__ import annotations

import pytest

from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Strategy
from tests.pool import WorkerPool
from tests.runtime.branches.networks import ONE, Case
from tests.runtime.branches.training import train_alone, train_each
from tests.runtime.training import Trained, assert_same

DATA, FOUR = Strategy(data=2), Strategy(data=4)
TWO = {"a": (("coders.0",), 0, 1, ONE), "b": (("coders.1",), 1, 1, ONE)}
TOWERS = {"text": (("text",), 1, 1, ONE), "picture": (("picture", "project"), 0, 1, ONE)}
CAPTIONS = {"picture": (("picture",), 0, 1, ONE), "text": (("words", "text"), 1, 1, ONE)}
HEADS = {"first": (("first",), 0, 1, ONE), "second": (("second",), 1, 1, ONE)}
CHAINS = {"one": (("up.0", "down.0"), 0, 1, ONE), "two": (("up.1", "down.1"), 1, 1, ONE)}


def coders_on(first: Strategy, second: Strategy) -> dict[str, tuple[tuple[str], int, int, Strategy]]:
    return {
        "a": (("coders.0",), 0, first.devices, first),
        "b": (("coders.1",), first.devices, second.devices, second),
    }


TWO_PROCESSES = {
    "coders": Case("Coders", TWO, ONE, 2, max_grad_norm=0.05),
    "coders-shared-trunk": Case("Coders", TWO, DATA, 2, samples=8),
    "coders-other-order": Case("Coders", TWO, ONE, 2, arguments={"order": (1, 0)}),
    "coders-one-sample": Case("Coders", TWO, ONE, 2, samples=1),
    "used-twice": Case("Coders", TWO, DATA, 2, arguments={"use": "twice"}),
    "told-only": Case("Coders", TWO, DATA, 2, arguments={"order": (0,), "use": "told"}),
    "changed-in-place": Case("Coders", TWO, DATA, 2, arguments={"use": "changed"}),
    "no-gradient": Case("Coders", TWO, ONE, 2, arguments={"use": "reduced"}),
    "three-on-two": Case(
        "Coders", {**TWO, "c": (("coders.2",), 1, 1, ONE)}, ONE, 2, arguments={"count": 3, "order": (2, 0, 1)}
    ),
    "towers": Case("Towers", TOWERS, ONE, 2, max_grad_norm=0.05),
    "towers-shared-trunk": Case("Towers", TOWERS, DATA, 2, arguments={"contrastive": False}),
    "captions": Case("Captions", CAPTIONS, ONE, 2),
    "captions-shared-trunk": Case("Captions", CAPTIONS, DATA, 2),
    "heads": Case("Heads", HEADS, DATA, 2, samples=8, microbatches=2),
    "heads-one-trunk": Case("Heads", HEADS, ONE, 2, max_grad_norm=0.05, samples=1),
    "chains": Case("Chains", CHAINS, ONE, 2),
    "chains-shared-trunk": Case("Chains", CHAINS, DATA, 2),
}
# fmt: off
FOUR_PROCESSES = {
    "tensor-inside": Case("Towers", {
        "text": (("text",), 0, 2, Strategy(tensor=2)), "picture": (("picture", "project"), 2, 1, ONE),
    }, FOUR, 4, samples=8, arguments={"contrastive": False}, max_grad_norm=0.05),
    "zero-inside": Case("Towers", {
        "text": (("text",), 1, 2, Strategy(zero=2, zero_stage=3)), "picture": (("picture", "project"), 0, 1, ONE),
    }, ONE, 4, samples=8, max_grad_norm=0.05),
    "spatial-inside": Case(
        "Heads",
        {
            "first": (("first",), 0, 3, Strategy(height=3)),
            "second": (("second",), 3, 1, ONE),
        },
        ONE,
        4,
    ),
    "recompute-inside": Case(
        "Heads",
        {
            "first": (("first",), 0, 2, Strategy(width=2)),
            "second": (("second",), 2, 2, Strategy(data=2, recompute=Recompute.FULL)),
        },
        FOUR,
        4,
        microbatches=2,
        samples=8,
    ),
}
# fmt: on


@pytest.fixture(scope="module")
def on_two(pool: WorkerPool) -> list[dict[str, Trained]]:
    return pool.run(2, train_each, cases=TWO_PROCESSES)


@pytest.fixture(scope="module")
def on_four(pool: WorkerPool) -> list[dict[str, Trained]]:
    return pool.run(4, train_each, cases=FOUR_PROCESSES)


@pytest.mark.parametrize("name", list(TWO_PROCESSES))
def test_like_one_process(on_two: list[dict[str, Trained]], name: str) -> None:
    wanted = train_alone(TWO_PROCESSES[name])
    for found in on_two:
        assert_same(found[name], wanted)


@pytest.mark.parametrize("name", list(FOUR_PROCESSES))
def test_four_processes(on_four: list[dict[str, Trained]], name: str) -> None:
    wanted = train_alone(FOUR_PROCESSES[name])
    for found in on_four:
        assert_same(found[name], wanted)
