"""Devices that share samples and states."""
