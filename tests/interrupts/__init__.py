"""What an interrupt may do to a program."""
