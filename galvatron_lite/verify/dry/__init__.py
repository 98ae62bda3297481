"""One rank of each role runs a step of a plan by the real runtime, on tensors without data."""
