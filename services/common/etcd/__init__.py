"""A thin etcd v3 client on grpc.aio: keys, leases, watches that survive what etcd does."""
