"""What runs in the process of a worker: `ServerShards` and its connections to the servers."""
