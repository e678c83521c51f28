"""Runs the actions of one rank."""
