"""Models drawn at random train like one process or are refused; ``scripts/check_equivalence --cases`` draws more."""

from __future__ import annotations

import pytest
import torch

from tests.equivalence.random_cases import Reference, check_case, differences
from tests.equivalence.random_models import draw_model
from tests.pool import WorkerPool

CASES = (
    (0, "free"),
    (9, "sampled"),
    (361, "sampled"),  # recurrent cells whose activations are offloaded
    (1068, "free"),  # blocks without which the model does not run
    (1118, "sampled"),  # a frozen table that the head shares
    (1152, "free"),  # a scale of shares of channels and of whole pictures
    (1216, "sampled"),  # a block that runs again in the stage that it begins
    (1469, "sampled"),  # batches behind the first that count unlike
)


@pytest.mark.parametrize(("seed", "kind"), CASES)
def test_random_models_train_like_one_process(pool: WorkerPool, seed: int, kind: str) -> None:
    result = check_case(pool, seed, kind, seconds=120.0)
    assert result.verdict in ("equal", "refused"), result


def test_a_stage_that_cannot_begin_is_refused_on_every_rank(pool: WorkerPool) -> None:
    """Two unlike blocks make one layer before an empty one, which a sampled plan gives to the second rank."""
    result = check_case(pool, 77, "sampled", seconds=120.0)
    assert result.verdict == "refused", result
    assert "begin its stage a layer earlier" in result.message


def test_the_same_seed_draws_the_same_model() -> None:
    first, second = draw_model(7), draw_model(7)
    assert first.traits == second.traits
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_difference_is_seen() -> None:
    tensors = {"weight": torch.tensor([1.0, 0.5])}
    reference = Reference([1.0], tensors, tensors)
    assert differences(reference, [1.0], tensors, tensors) == []
    off = {"weight": torch.tensor([1.0, 0.5002])}
    assert len(differences(reference, [1.0002], off, off)) == 3
