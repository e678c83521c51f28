"""What a run will do, before it starts: the cut model and its programs, proven."""
