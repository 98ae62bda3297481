"""Fits the constants of configs/calibration to published training runs; run by ``scripts/calibrate``."""
