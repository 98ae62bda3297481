"""Train the quickstart's model under a plan and write what was measured; every rank runs it."""

from quickstart_model import BATCH, batches, make
from training import Job, run

if __name__ == "__main__":
    run(Job(make, batches, BATCH, steps=80), __doc__)
