"""Plans beside those of stages in the model's order: branches on devices of their own, delayed gradients."""
