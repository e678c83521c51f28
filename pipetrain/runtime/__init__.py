"""MACHINE: runs one rank's list of actions."""
