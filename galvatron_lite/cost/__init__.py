"""Adds the dimensions up: layer, stage, step."""
