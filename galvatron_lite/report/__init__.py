"""``galvatron report``: one HTML file that shows plans, and the trace of a step. No torch here."""
