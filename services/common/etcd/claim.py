"""Claims: who of several does a job that one shall do.

Two never have a claim at once by etcd's word. Who acts on one it has must end in its time, counted
from before it asked; for work that two doing it does not hurt, that may be left out.
"""

from __future__ import annotations

from etcdserverpb import rpc_pb2 as pb

from services.common.etcd.client import EtcdClient


async def claim(
    client: EtcdClient, key: bytes, value: bytes, ttl_s: float, *, timeout_s: float = 2.0
) -> bool:
    """Takes `key` for `ttl_s`, or longer when it is ours (of the same value) already.

    False: another has it. Who claims again before the time is over keeps it. Raises
    EtcdUnavailable or EtcdRefused.
    """
    request = pb.LeaseGrantRequest(TTL=max(1, round(ttl_s)))
    lease = await client.call(
        "lease grant",
        lambda c, m, t: c.lease.LeaseGrant(request, metadata=m, timeout=t),
        timeout_s=timeout_s,
    )
    absent = pb.Compare(result=pb.Compare.EQUAL, target=pb.Compare.VERSION, key=key, version=0)
    ours = pb.Compare(result=pb.Compare.EQUAL, target=pb.Compare.VALUE, key=key, value=value)
    put = pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease.ID))
    # The key leaves an earlier lease of ours for this one; that one then ends by itself.
    for condition in (absent, ours):
        if (await client.txn([condition], [put])).succeeded:
            return True
    revoke = pb.LeaseRevokeRequest(ID=lease.ID)
    await client.call(
        "lease revoke", lambda c, m, t: c.lease.LeaseRevoke(revoke, metadata=m, timeout=t)
    )
    return False


async def resign(client: EtcdClient, key: bytes, value: bytes) -> None:
    """Gives `key` up, if it is ours (of this value). Raises EtcdUnavailable or EtcdRefused."""
    ours = pb.Compare(result=pb.Compare.EQUAL, target=pb.Compare.VALUE, key=key, value=value)
    delete = pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))
    await client.txn([ours], [delete])
