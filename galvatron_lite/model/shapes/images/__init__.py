"""Image networks from compact descriptions of their families, layer by layer or summed up."""
