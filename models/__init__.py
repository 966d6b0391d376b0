"""Decoder models made from a config and a name map."""
