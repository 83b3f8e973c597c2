"""Forebay's services; each is a package of its own and none imports another."""
