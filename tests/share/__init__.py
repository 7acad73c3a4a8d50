"""Memory shared between processes."""
