"""Parameters and buffers of a split model: what each rank holds, updates, and starts from."""
