"""One strategy a layer along a chain of layers, exactly: bounds first, labels where they leave a gap."""
