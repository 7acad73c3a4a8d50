"""Where memory goes."""
