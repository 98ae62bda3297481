"""Which ranks of a stage lie next to one another."""
