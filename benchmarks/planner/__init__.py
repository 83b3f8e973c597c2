"""What the planner is worth: simulated time, two pools, and every fixed split beside it."""
