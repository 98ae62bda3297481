"""Training loops of other libraries around models that are split."""
