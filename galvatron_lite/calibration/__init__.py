"""Constants that are calibrated, per device type, link type and software stack, and where they come from."""
