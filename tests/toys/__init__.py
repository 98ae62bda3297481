"""A schedule and a dimension that the package has not, each defined in one file, and what is done with them."""
