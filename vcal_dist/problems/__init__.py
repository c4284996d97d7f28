"""Calibration problems with a known simulator and, where it is synthetic, a known truth."""
