"""Hetu-Galvatron (PKU-DAIR): its cost model, its search space and its recorded searches, beside ours."""
