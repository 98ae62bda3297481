"""Runs a plan on torch.distributed."""
