"""What is built on pools."""
