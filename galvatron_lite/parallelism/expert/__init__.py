"""Expert parallelism: the experts of a mixture are spread over ranks that hold different tokens."""
