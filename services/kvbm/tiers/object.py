"""Remote storage (G4), shared by nodes: an S3 bucket or a folder. Its health, and its opening.

It may be away, slow, wrong or full, at the start and later: that costs blocks, and never an error
beyond this file. While it doesn't answer it is asked nothing, except whether it answers again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from services.common.arena import Arena
from services.common.telemetry.logging import get_logger
from services.kvbm.movers.directory import DirectoryObjects
from services.kvbm.movers.objects import Objects, StoreError
from services.kvbm.movers.port import FileMover
from services.kvbm.movers.s3 import S3Objects, S3Place
from services.kvbm.movers.select import open_file_mover
from services.kvbm.tiers.objectspace import RemoteCounters, RemoteSpace
from services.kvbm.tiers.port import Health

log = get_logger(__name__)
_PROBE_S = 5.0
_USED = 4096
"""Most objects remembered as used since they were last looked after."""


class RemoteTier:
    """Implements ObjectTier. Loop's thread only."""

    def __init__(
        self, objects: Objects, *, run_blocks: int, timeout_s: float, ttl_s: float = 0.0
    ) -> None:
        self.objects = objects
        self.place = objects.place
        self.health = Health(False, "not tried yet")
        self.ttl_s = ttl_s
        self.counters = RemoteCounters()
        self._run_blocks = run_blocks
        self._timeout_s = timeout_s
        self._away = True
        self._spaces: dict[bytes, RemoteSpace] = {}
        self._used: OrderedDict[str, None] = OrderedDict()
        self._probing = asyncio.Lock()

    @property
    def backend(self) -> str:
        """See ObjectTier."""
        return self.objects.name

    async def open(self, namespace: bytes, arena: Arena) -> RemoteSpace:
        """See ObjectTier."""
        if namespace != arena.namespace:
            raise ValueError("the arena is another namespace's")
        space = RemoteSpace(
            self.objects,
            arena,
            self._run_blocks,
            self.counters,
            refusal=self._refusal,
            failed=self._failed,
            used=self._note_use,
            closed=self._closed,
        )
        await space.open()
        self._spaces[namespace] = space
        return space

    async def probe(self) -> Health:
        """See ObjectTier."""
        async with self._probing:
            try:
                await self.objects.open(min(_PROBE_S, self._timeout_s))
            except StoreError as exc:
                self._failed(str(exc), exc.away)
            else:
                if not self.health.ok:
                    log.info("remote storage works", place=self.place, backend=self.backend)
                self._away = False
                self.health = Health(True)
        return self.health

    async def close(self) -> None:
        """See ObjectTier."""
        for space in list(self._spaces.values()):
            await space.close()
        await self.objects.close()

    @property
    def namespaces(self) -> list[bytes]:
        """Those in use here."""
        return list(self._spaces)

    def take_used(self) -> list[str]:
        """Objects that were loaded since this was last asked."""
        used = list(self._used)
        self._used.clear()
        return used

    def _refusal(self, reading: bool) -> str:
        """Empty, or why nothing is tried now. Reads go on while only writes are refused."""
        if self.health.ok or (reading and not self._away):
            return ""
        return f"degraded: {self.health.why}"

    def _failed(self, why: str, away: bool) -> None:
        if self.health.ok or why != self.health.why:
            log.warning("remote storage is degraded", place=self.place, why=why, away=away)
        self._away = away
        self.health = Health(False, why)

    def _closed(self, space: RemoteSpace) -> None:
        if self._spaces.get(space.namespace) is space:
            del self._spaces[space.namespace]

    def _note_use(self, name: str) -> None:
        if self.ttl_s and name not in self._used:
            self._used[name] = None
            if len(self._used) > _USED:
                self._used.popitem(last=False)


@asynccontextmanager
async def open_object_tier(
    url: str,
    endpoint: str,
    region: str,
    access_key: str,
    secret_key: str,
    *,
    run_blocks: int,
    timeout_s: float,
    ttl_s: float,
    nixl: bool,
    file_mover: FileMover | None,
    direct: bool = True,
) -> AsyncIterator[RemoteTier]:
    """The remote storage at `url`, s3://bucket/prefix or file:///folder.

    Of a folder: `file_mover` moves its files (None: one of its own), `direct` whether to bypass the
    page cache where that works.

    One that doesn't work starts degraded. Raises ValueError for a URL of another kind.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        folder = Path(parts.path)

        async def open_mover() -> FileMover:
            if file_mover is not None:
                return file_mover
            return await open_file_mover(nixl=nixl, direct=direct, gds=False, folder=folder)

        objects: Objects = DirectoryObjects(folder, open_mover, owned=file_mover is None)
    elif parts.scheme == "s3" and parts.netloc:
        if endpoint and "://" not in endpoint:
            endpoint = f"http://{endpoint}"
        place = S3Place(
            parts.netloc, parts.path.strip("/"), endpoint, region, access_key, secret_key
        )
        objects = S3Objects(place, nixl=nixl, timeout_s=timeout_s)
    else:
        raise ValueError(f"remote storage must begin with s3:// or file://, not {url!r}")
    tier = RemoteTier(objects, run_blocks=run_blocks, timeout_s=timeout_s, ttl_s=ttl_s)
    try:
        await tier.probe()
        yield tier
    finally:
        await tier.close()
