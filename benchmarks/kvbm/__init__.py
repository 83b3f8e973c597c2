"""What kvbm costs and saves: copies, disks, remote storage, eviction, the whole engine."""
