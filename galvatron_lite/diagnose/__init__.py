"""Where a run and its prediction part ways."""
