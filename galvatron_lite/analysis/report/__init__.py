"""The report: one HTML page of plans, and a timeline for trace viewers."""
