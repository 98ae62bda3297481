"""Independent branches of a model, each on ranks of its own; the trunk, which is all else, runs on every rank."""
