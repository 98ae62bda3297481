"""Tensors that are cut along some dims, and what functions do with them."""
