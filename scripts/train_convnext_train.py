"""Train the example's ConvNeXt under a plan and write what was measured; every rank runs it."""

from train_convnext_model import BATCH, LEARNING_RATE, MAX_GRAD_NORM, batches, make
from training import Job, run

if __name__ == "__main__":
    run(Job(make, batches, BATCH, 40, LEARNING_RATE, MAX_GRAD_NORM), __doc__)
