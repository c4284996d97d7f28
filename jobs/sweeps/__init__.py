"""Sweeps: many trainings with settings from a space, on Ray Tune."""
