"""Whether what a dry run did is what the plan says and what the cost model priced."""
