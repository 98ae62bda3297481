"""Optimizer states and activations in host memory."""
