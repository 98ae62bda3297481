"""Profiles and plans of other planners, converted to ours and back."""
