"""Training over several ranks: the Pipeline, the loop over its windows, and fit."""
