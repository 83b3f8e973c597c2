"""Where blocks lie, one file a tier: host memory (G2), local disk (G3), remote storage (G4)."""
