"""The pool as its users see it."""
