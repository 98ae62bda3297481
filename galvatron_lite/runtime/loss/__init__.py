"""The loss of a batch that ranks and micro-batches share."""
