"""What each layer costs, and where the model is cut."""
