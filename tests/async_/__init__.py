"""Promises of the waiting side: fairness, cancellation, lifecycle, and the harness that looks for their bugs."""
