"""The options of a run: read once, by one rule each, and what they name built."""
