"""Everything outside the planner that it talks to: one file each."""
