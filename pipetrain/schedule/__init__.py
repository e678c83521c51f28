"""Schedules: pure functions over lists of actions, without torch."""
