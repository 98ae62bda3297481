"""Check that a plan trains like one process, by training a small model under a small plan."""
