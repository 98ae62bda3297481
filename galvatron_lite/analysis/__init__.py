"""What plans and their predictions say: explanations, comparisons, sweeps, reports, figures."""
