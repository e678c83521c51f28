"""One run from start to end: epochs, evaluation, records."""
