"""The router: a read model of who holds what and who is how busy, and the placement decision."""
