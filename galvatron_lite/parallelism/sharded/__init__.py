"""Tensors of which each rank holds a shard, and what torch functions do with them."""
