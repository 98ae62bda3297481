"""Where a model is trained: devices, links, and what communication over them costs."""
