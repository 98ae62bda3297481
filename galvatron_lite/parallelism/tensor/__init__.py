"""Devices that share the matmuls of each sample."""
