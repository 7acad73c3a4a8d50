"""What pictures look like in a browser: for `tox -e browser` alone."""
