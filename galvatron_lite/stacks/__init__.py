"""Training software: the properties of a framework that costs depend on."""
