"""Estimates of what models need."""
