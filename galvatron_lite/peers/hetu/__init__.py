"""Hetu-Galvatron (PKU-DAIR): its profile and plan files, and its cost model."""
