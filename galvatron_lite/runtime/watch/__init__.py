"""Where every rank is in its step, told to all, so that an error names the rank that is gone, failed or hangs."""
