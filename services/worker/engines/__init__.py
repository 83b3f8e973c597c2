"""Engines behind one port."""
