"""A package, so that its engines end with it: see conftest.py."""
