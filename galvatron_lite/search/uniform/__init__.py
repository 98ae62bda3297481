"""Plans whose groups of devices run several virtual stages, with one strategy a part of the model."""
