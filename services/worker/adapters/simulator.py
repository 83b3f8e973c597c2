"""simulator.v1.SimulatorService over gRPC: faults of one simulated worker, set off by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from forebay.simulator.v1 import simulator_pb2 as pb
from forebay.simulator.v1 import simulator_pb2_grpc

from services.common.errors import InvalidRequest, Unavailable
from services.common.rpc.server import Service
from services.worker.engines.sim.core.faults import Fault, FaultKind, faults_from

_KINDS = {
    pb.FAULT_KIND_STALL: FaultKind.STALL,
    pb.FAULT_KIND_SLOW: FaultKind.SLOW,
    pb.FAULT_KIND_DIE: FaultKind.DIE,
    pb.FAULT_KIND_DROP: FaultKind.DROP,
    pb.FAULT_KIND_LIE: FaultKind.LIE,
}


class SimulatorServicer(simulator_pb2_grpc.SimulatorServiceServicer):
    """Hands faults to `inject`, once that is there."""

    def __init__(self) -> None:
        self.inject: Callable[[Fault], None] | None = None

    async def InjectFault(
        self,
        request: pb.InjectFaultRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.InjectFaultResponse:
        """Sets off a fault."""
        if request.kind not in _KINDS:
            raise InvalidRequest("kind must be one of FaultKind", field="kind")
        row: dict[str, object] = {"kind": _KINDS[request.kind]}
        if request.HasField("duration_s"):
            row["for_s"] = request.duration_s
        if request.HasField("factor"):
            row["factor"] = request.factor
        if request.HasField("share"):
            row["share"] = request.share
        try:
            (fault,) = faults_from([row])
        except ValueError as exc:
            raise InvalidRequest(str(exc)) from exc
        if self.inject is None:
            raise Unavailable("the engine is starting", reason="STARTING")
        self.inject(fault)
        return pb.InjectFaultResponse()


def service_of(servicer: SimulatorServicer) -> Service:
    """The servicer as the RPC server takes it."""
    return Service(
        "forebay.simulator.v1.SimulatorService",
        simulator_pb2_grpc.add_SimulatorServiceServicer_to_server,
        servicer,
    )
