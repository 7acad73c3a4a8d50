"""Harnesses for the readers of files, and what runs them."""
