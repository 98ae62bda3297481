"""A whole network over small pictures trains on shares of its pixels as in one process; the others: ``networks``.

Sampled plans train small ones of the same kind in every run; this one has as many layers as the published network.
"""

from __future__ import annotations

import pytest

from tests.equivalence.networks import NETWORKS, TOLERANCE, check_network, train_network_alone
from tests.pool import WorkerPool


@pytest.mark.study
def test_resnet_50_on_halves_of_its_pictures(pool: WorkerPool) -> None:
    network = NETWORKS["resnet-50"]
    off = check_network(pool, network, 2, train_network_alone(network))
    assert {name: error for name, error in off.items() if not error <= TOLERANCE} == {}
    # all of its state, and three losses
    assert len(off) > 300
