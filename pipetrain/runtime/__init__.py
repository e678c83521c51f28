"""Runs the list of actions of one rank."""
