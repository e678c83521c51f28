"""PAPER: what runs when. Pure functions over lists of actions; never imports torch."""
