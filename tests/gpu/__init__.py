"""What only a real GPU can show: the same numbers, the same order, for minutes on end. Run by `tox -e gpu`."""
