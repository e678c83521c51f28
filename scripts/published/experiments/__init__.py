"""The records, one file each: what is run, what is drawn, and what must come back."""
