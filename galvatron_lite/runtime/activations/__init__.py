"""Activations between layers that are split in unlike ways."""
