"""What layers and communication cost, measured or estimated."""
