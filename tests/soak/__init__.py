"""What only long runs find; the same, for seconds, with every run of the tests."""
