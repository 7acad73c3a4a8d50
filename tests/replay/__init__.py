"""Recordings, their files, and what becomes of them."""
