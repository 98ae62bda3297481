"""Spatial parallelism: devices share the pixels of each sample."""
