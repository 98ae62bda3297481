"""Whole convolutional networks under plans and by one process; see ``scripts/check_networks``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tests.equivalence.networks import NETWORKS, TOLERANCE, check_network, train_network_alone
from tests.pool import WorkerPool


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the networks; 1 where any trains differently."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NETWORKS), metavar="NETWORK", help=", ".join(NETWORKS))
    parser.add_argument("--worlds", nargs="+", type=int, choices=(2, 4), default=(2, 4))
    options = parser.parse_args(arguments)
    pool, wrong = WorkerPool(), 0
    for name in options.names:
        wanted = train_network_alone(NETWORKS[name])
        for world in options.worlds:
            start = time.monotonic()
            off = check_network(pool, NETWORKS[name], world, wanted)
            worst = max(off, key=lambda one: off[one])
            wrong += off[worst] > TOLERANCE
            took = time.monotonic() - start
            print(f"{name} on {world}: at most {off[worst]:.1e} off ({worst}), {took:.0f} s", flush=True)
    pool.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
