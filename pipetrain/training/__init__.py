"""LIFE of a run: epochs, evaluation, learning rate, records."""
