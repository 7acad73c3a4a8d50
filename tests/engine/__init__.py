"""The decisions by themselves."""
