"""Training loops of other libraries around parallel models."""
