"""What is trained: a model as layers."""
