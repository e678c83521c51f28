"""Communication: the ranks, their process groups, and what travels between them."""
