"""`python -m services.common.rpc.probe host:port`: asks a gRPC server for its health, once.

Exit status 0 when it serves, 1 when it does not, 2 for a wrong command line. For container health
checks, in images that have no other client.
"""

import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0
"""Longest wait for the answer."""


def probe(address: str, timeout_s: float = TIMEOUT_S) -> str:
    """Health of the server at host:port: SERVING, another status of gRPC health, or UNREACHABLE."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s
            )
        except grpc.RpcError:
            return "UNREACHABLE"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main(argv: Sequence[str]) -> int:
    """Command line."""
    if len(argv) != 1:
        print("usage: python -m services.common.rpc.probe host:port", file=sys.stderr)
        return 2
    health = probe(argv[0])
    print(health)
    return 0 if health == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
