"""The client's messages to kvbm, made of the connector's words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from forebay.kvbm.v1 import kvbm_pb2 as pb

from services.worker.connector.instructions import Ended, Fill
from services.worker.connector.news import Hello


def attach_request(hello: Hello, former_owner: int) -> pb.AttachRequest:
    """Introduces an engine whose copies for `former_owner` have all ended (0: there is none)."""
    return pb.AttachRequest(
        namespace=hello.namespace,
        geometry=pb.Geometry(
            block_size_tokens=hello.geometry.block_size,
            shard_bytes=hello.geometry.shard_bytes,
            ranks=hello.geometry.ranks,
            layout=hello.geometry.layout,
        ),
        rank=hello.rank,
        worker=hello.worker,
        former_owner=former_owner,
        g1_bytes=hello.g1_bytes,
        model=hello.model,
    )


def commit_request(owner: int, fills: Sequence[Fill], grant: int) -> pb.CommitRequest:
    """Says which slots are filled or given back, and how many new ones are wanted."""
    return pb.CommitRequest(
        owner=owner,
        filled=[
            pb.Filled(
                slot=pb.Slot(index=f.slot.index, generation=f.slot.generation),
                key=f.key,
                parent=f.parent,
                position=f.position,
                tenant=f.tenant,
                checksum=f.checksum,
            )
            for f in fills
        ],
        grant=grant,
    )


def release_request(ended: Iterable[Ended]) -> pb.ReleaseRequest:
    """Ends leases, and says how their loads went."""
    return pb.ReleaseRequest(
        leases=[
            pb.LoadReport(
                lease=e.lease, loaded_blocks=e.loaded, seconds=e.seconds, bad_blocks=e.bad
            )
            for e in ended
        ]
    )


def result_name(result: Any) -> str:
    """A commit's result as a word: "stored", "duplicate", ..."""
    return pb.CommitResult.Name(result).removeprefix("COMMIT_RESULT_").lower()


def needless(result: Any) -> bool:
    """Whether the block needs no save any more: it is there, on its way, or not welcome."""
    return result not in (pb.COMMIT_RESULT_FENCED, pb.COMMIT_RESULT_UNSPECIFIED)
