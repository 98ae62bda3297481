"""Runs of a model without storages: what its layers do, seen operator by operator."""
