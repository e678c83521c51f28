"""KNIFE: where the model is cut."""
