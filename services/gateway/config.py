"""What a gateway can be told. Filled and validated once; nobody else reads the environment."""

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from services.common.settings import ServiceSettings, StrList, settings_config

_LEAST_SILENCE_S = 3.0
"""Workers give signs of life every second; fewer missing ones say nothing."""


def _silence(value: float) -> float:
    if value and value < _LEAST_SILENCE_S:
        raise ValueError(f"must be 0 (never), or at least {_LEAST_SILENCE_S:g} seconds")
    return value


class GatewaySettings(ServiceSettings):
    """Settings of a gateway: flags, FOREBAY_GATEWAY_* variables, table [gateway] of the file."""

    model_config = settings_config("gateway")
    service: ClassVar[str] = "gateway"

    port: int = Field(default=8000, ge=0, le=65535)
    """Port of the OpenAI API; 0 picks a free one."""
    metrics_port: int = Field(default=8001, ge=0, le=65535)
    """Port of /metrics; 0 picks a free one."""

    max_body_bytes: int = Field(default=32 << 20, ge=1024)
    """Largest request body in bytes; larger ones get 413 without being read."""
    body_timeout_s: float = Field(default=60.0, gt=0)
    """Longest wait in seconds for a request's body to arrive; then 408."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Longest life of a request in seconds, to its last byte; then 504, or an error event."""
    sse_keep_alive_s: float = Field(default=0.0, ge=0)
    """Seconds of silence on a stream after which a comment line is sent; 0 sends none."""
    response_headers: bool = True
    """Whether answers carry x-forebay-* headers (worker and cached tokens)."""
    routing_headers: bool = True
    """Whether x-session-id and x-forebay-worker, -exclude and -labels of requests are followed."""
    api_keys_file: str = ""
    """TOML or JSON file of keys (or "sha256:" and a key's hex digest) and their tenants. Empty: no
    keys are asked for.
    """
    cors_origins: StrList = ()
    """Origins that browsers may call from, comma-separated; "*" for any. Empty: no CORS headers."""
    max_in_flight: int = Field(default=8192, ge=1)
    """Most requests served at once; a further one gets 503. More open files must be allowed."""
    backlog: int = Field(default=2048, ge=16)
    """Length of the listen backlog."""
    http_keep_alive_s: float = Field(default=75.0, gt=0)
    """Seconds after which an idle client connection is closed."""
    drain_notice_s: float = Field(default=0.0, ge=0)
    """After SIGTERM: seconds of further full service while readiness already answers 503."""

    max_migrations: int = Field(default=3, ge=0)
    """How often one sequence may be carried on by another worker."""
    router_timeout_s: float = Field(default=1.0, gt=0)
    """Longest wait in seconds for a router's placement; then the next router, then least-loaded."""
    router_addresses: StrList = ()
    """Routers to use, host:port each, comma-separated. Empty: those in discovery."""
    connect_timeout_s: float = Field(default=2.0, gt=0)
    """Longest wait in seconds for a worker's connection when a request needs it."""
    silence_timeout_s: Annotated[float, AfterValidator(_silence)] = 10.0
    """Seconds without any sign of life from a worker until our requests there go on elsewhere.

    Signs come every second; 0: never.
    """
    stall_timeout_s: float = Field(default=120.0, ge=0)
    """Seconds without any frame from a worker that has our requests, after which they go elsewhere;
    0 never. Longer than the longest prefill.
    """

    model_cache_dir: str = ""
    """Directory for files fetched from workers, by digest. Empty: ~/.cache/forebay/models."""
