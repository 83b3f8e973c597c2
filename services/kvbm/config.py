"""What a kvbm daemon can be told."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import NoDecode

from services.common.net import is_loopback
from services.common.settings import ServiceSettings, settings_config

GIB = 1 << 30


def _quotas(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value or "{}")
    except ValueError as exc:
        raise ValueError(
            f'must be a JSON object such as {{"acme": {{"g2": 4, "g3": 40}}}}: {exc}'
        ) from exc
    return read


Quotas = Annotated[dict[str, dict[str, float]], NoDecode, BeforeValidator(_quotas)]
"""Tenant -> tier (g2, g3, g4) -> GiB, as JSON or a TOML table; "*" is every other tenant."""


class KvbmSettings(ServiceSettings):
    """Settings of one node's daemon."""

    service: ClassVar[str] = "kvbm"
    model_config = settings_config("kvbm")

    port: int = Field(default=8300, ge=0, le=65535)
    """Port of the gRPC server; 0 picks a free one."""
    socket: str = ""
    """Path of a Unix socket to serve on as well; empty: none."""
    events_port: int = Field(default=8301, ge=0, le=65535)
    """Port of the event stream (ZMQ PUB); 0 picks a free one."""
    metrics: bool = True
    """Whether to serve /metrics."""
    metrics_port: int = Field(default=6880, ge=0, le=65535)
    """Port of /metrics; 0 picks a free one."""
    cpu_cache_gb: float = Field(default=4.0, gt=0)
    """GiB of host memory for blocks (G2), allocated and locked at the first engine's arrival."""
    cpu_cache_dir: str = ""
    """Folder on tmpfs or hugetlbfs for the arenas; empty: forebay-<uid>-<id> in /dev/shm."""
    arena_share: float = Field(default=1.0, gt=0, le=1)
    """Share of G2 that one namespace (model, format) gets; less than 1 leaves room for others."""
    disk_cache_gb: float = Field(default=0.0, ge=0)
    """GiB of disk for blocks (G3); 0: none."""
    disk_cache_dir: str = ""
    """Folder for G3; required when disk_cache_gb is not 0."""
    disk_free_gb: float = Field(default=1.0, ge=0)
    """GiB of the disk that are always left free, whatever disk_cache_gb says."""
    disk_write_mb_s: float = Field(default=200.0, gt=0)
    """Write budget of the disk, in MiB a second on average; bursts of ten seconds pass."""
    disk_timeout_s: float = Field(default=5.0, gt=0)
    """Longest wait for one batch of disk I/O, in seconds."""
    remote_url: str = ""
    """Remote storage (G4): s3://bucket/prefix or file:///folder; empty: none."""
    remote_endpoint: str = ""
    """Address of an S3 server other than AWS, such as http://host:8333."""
    remote_region: str = "us-east-1"
    """S3 region."""
    remote_access_key: str = Field(default="", repr=False)
    """S3 access key; empty: AWS_ACCESS_KEY_ID, or the machine's role."""
    remote_secret_key: str = Field(default="", repr=False)
    """S3 secret key; empty: AWS_SECRET_ACCESS_KEY."""
    remote_run_blocks: int = Field(default=8, ge=1, le=256)
    """Blocks in one remote object; equal on all nodes that share the storage."""
    remote_timeout_s: float = Field(default=10.0, gt=0)
    """Longest wait for one batch of remote I/O, in seconds."""
    remote_ttl_s: float = Field(default=0.0, ge=0)
    """Seconds after which remote objects expire; 0: never."""
    peers: Literal["auto", "on", "off"] = "auto"
    """Whether to exchange blocks with other nodes' daemons; auto: unless `host` is loopback."""
    peer_window_mb: int = Field(default=64, ge=1, le=65536)
    """MiB of memory through which other nodes read blocks of this one."""
    peer_timeout_s: float = Field(default=2.0, gt=0)
    """Longest wait for one step of a fetch from a peer, in seconds; then its agent is ended."""
    nixl: bool = True
    """Whether to move bytes by NIXL where it works; plain I/O stands behind it."""
    nixl_backend_gds: bool = False
    """Whether to try GPUDirect Storage; off when it doesn't work."""
    direct_io: bool = True
    """Whether to bypass the page cache (O_DIRECT) where the file system allows it."""
    ttl_s: float = Field(default=0.0, ge=0)
    """Seconds after which a block is forgotten in every tier; 0: never."""
    quotas: Quotas = Field(default_factory=dict)
    """Byte quotas for tenants and tiers in GiB, such as {"acme": {"g2": 4}, "*": {"g3": 10}}."""
    lease_s: float = Field(default=60.0, gt=0)
    """Seconds after which a lease that nobody released ends."""
    promote_ms: int = Field(default=2000, ge=0)
    """Longest wait for promotions from G3, G4 and peers, in milliseconds."""
    recompute_tokens_per_s: float = Field(default=4000.0, gt=0)
    """Prefill rate assumed of an engine that doesn't say its own, in tokens a second."""
    gate: Literal["measured", "always", "never"] = "measured"
    """measured: load only what beats recomputing; always, never: for comparisons."""
    verify: bool = True
    """Whether every block's bytes are checked; false only to show what that prevents."""
    grant_blocks: int = Field(default=1024, ge=1, le=4096)
    """Most empty slots that one engine may hold; it asks for two of its steps' blocks."""
    pin_share: float = Field(default=0.5, ge=0, le=1)
    """Most of a tier that pins may keep."""
    scrub_mb_s: float = Field(default=50.0, ge=0)
    """MiB a second that are verified in the background; 0: none."""
    digest_interval_s: float = Field(default=5.0, gt=0)
    """Seconds between digests of all blocks stored, by which routers check what they know."""
    purge: bool = False
    """Removes all arenas and disk blocks at start instead of adopting them."""

    @property
    def arena_dir(self) -> Path:
        """Folder of the arenas."""
        if self.cpu_cache_dir:
            return Path(self.cpu_cache_dir)
        shm = Path("/dev/shm")
        root = shm if shm.is_dir() else Path(tempfile.gettempdir())
        return root / f"forebay-{os.getuid()}-{self.id or self.cluster}"

    @property
    def g2_bytes(self) -> int:
        """Bytes of G2."""
        return int(self.cpu_cache_gb * GIB)

    @property
    def g3_bytes(self) -> int:
        """Bytes of G3; 0: none."""
        return int(self.disk_cache_gb * GIB)

    @property
    def peers_off(self) -> str:
        """Why no blocks are exchanged with other nodes; empty: they are."""
        if self.peers == "off":
            return "off: as set (peers)"
        if not self.nixl:
            return "off: as set (nixl)"
        if self.peers == "auto" and is_loopback(self.host):
            return "off: this daemon listens on loopback"
        return ""

    @property
    def peer_window_bytes(self) -> int:
        """Bytes of the export window."""
        return self.peer_window_mb << 20

    @property
    def shared_storage(self) -> str:
        """Names the remote storage, equal on all nodes that share it; empty: none that is known to.

        A folder may be mounted on all nodes or on this one alone: that can't be told from here.
        """
        return f"{self.remote_endpoint}/{self.remote_url}" if self.remote_url[:3] == "s3:" else ""

    @property
    def disk_folder(self) -> Path:
        """Folder of G3."""
        return Path(self.disk_cache_dir)

    @property
    def disk_free_bytes(self) -> int:
        """Bytes of the disk that stay free."""
        return int(self.disk_free_gb * GIB)

    @field_validator("remote_url")
    @classmethod
    def _url(cls, value: str) -> str:
        if not value:
            return value
        url = urlsplit(value)
        if url.scheme not in ("s3", "file"):
            raise ValueError("must begin with s3:// or file://")
        if url.scheme == "s3" and len(url.netloc) < 3:
            raise ValueError("must name a bucket of 3 or more letters: s3://bucket/prefix")
        if url.scheme == "file" and (url.netloc or not url.path.startswith("/")):
            raise ValueError("must be file:// and an absolute folder: file:///mnt/kv")
        return value

    @field_validator("quotas")
    @classmethod
    def _tiers(cls, value: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        for tenant, tiers in value.items():
            for tier, gib in tiers.items():
                if tier not in ("g2", "g3", "g4") or gib < 0:
                    raise ValueError(
                        f"tenant {tenant!r}: must map g2, g3 or g4 to GiB; {tier!r}: {gib} does not"
                    )
        return value

    @model_validator(mode="after")
    def _disk(self) -> KvbmSettings:
        if self.disk_cache_gb and not self.disk_cache_dir:
            raise ValueError("disk_cache_dir must name a folder when disk_cache_gb is not 0")
        return self
