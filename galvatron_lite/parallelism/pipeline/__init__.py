"""Stages of consecutive layers on separate devices."""
