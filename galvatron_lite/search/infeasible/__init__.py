"""Where nothing fits: the plan that needs least memory, and what else would help."""
