"""`forebay bench`: measurements that need no cluster and no GPU."""
