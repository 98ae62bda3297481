"""One stage: the exact search along a chain of layers, one strategy a layer."""
