"""The costs of layers, and the choice of cuts."""
