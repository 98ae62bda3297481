"""Check that a dry run does what the plan says and what the cost model priced."""
