"""How much is reserved for programs that no policy was tuned to."""
