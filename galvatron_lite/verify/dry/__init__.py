"""Run a step of one rank of each role with the real runtime, on tensors without data."""
