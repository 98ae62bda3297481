"""What the commands print, in files beside the test."""
