"""Questions people ask of the planner, each answered by plans that ``search`` has proven. No torch here."""
