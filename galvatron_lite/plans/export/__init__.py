"""Settings of other training software: plans written as settings, and settings read as plans."""
