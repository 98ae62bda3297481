"""The training software: what it decides that costs depend on."""
