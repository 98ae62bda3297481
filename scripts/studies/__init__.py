"""Studies: comparisons and fits that the package itself does not need."""
