"""What a run did: numbers, drawings and files."""
