"""Running a plan without its cluster: what would happen there, and whether it is what the plan says."""
