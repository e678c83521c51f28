"""What runs when: pure functions over lists of actions, without torch."""
