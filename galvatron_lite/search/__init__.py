"""Finds the plan with the least step time inside the memory budget."""
