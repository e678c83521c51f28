"""Checkpoints: saved between windows, verified, and loaded into any partition."""
