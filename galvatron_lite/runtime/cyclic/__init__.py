"""Training by cyclic data parallelism (Fournier and Oyallon 2024, arXiv 2403.08837)."""
