"""Independent parts of a model on devices of their own."""
