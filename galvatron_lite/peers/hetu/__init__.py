"""Hetu-Galvatron (PKU-DAIR): its profiles and plans."""
