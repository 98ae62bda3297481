"""How a layer can be split: one folder a dimension, each with ``cost.py`` (no torch) and ``apply.py`` (torch)."""
