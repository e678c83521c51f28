"""Checkpoints: saved between windows, proved whole, loaded into any partition."""
