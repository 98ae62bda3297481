"""Changing the plan while training runs."""
