"""Whether a plan trains like one process: a shrunken model under a shrunken plan, run for real."""
