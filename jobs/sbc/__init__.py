"""Simulation-based calibration of a configuration: replicates in many processes, and what they say together."""
