"""Measures of accuracy."""
