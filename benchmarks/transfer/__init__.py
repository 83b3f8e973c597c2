"""What transfers between engines cost, and what their end takes."""
