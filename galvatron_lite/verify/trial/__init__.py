"""What of a model's loss, parameters and buffers depends on how a batch is shared, tried on a small copy."""
