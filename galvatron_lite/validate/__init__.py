"""Holding the cost model against published training runs."""
