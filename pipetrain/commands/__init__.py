"""What a shell starts. Each command reads its words and calls the floors below: wiring only."""
