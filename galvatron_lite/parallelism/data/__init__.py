"""Replicas that share the samples."""
