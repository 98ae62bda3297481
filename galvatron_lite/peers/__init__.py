"""Other planners' profiles and plans: read, priced by their own formulas, turned into ours and back."""
