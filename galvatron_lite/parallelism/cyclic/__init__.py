"""Cyclic data parallelism: micro-batches follow one another through the stages, two time steps apart."""
