"""What a real GPU has to show: the same numbers, the same order, for minutes on end. Run by `tox -e gpu`."""
