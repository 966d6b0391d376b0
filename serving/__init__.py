"""Batch server."""
