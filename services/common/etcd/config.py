"""Where etcd is, how we show who we are, and how it says no."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from services.common.errors import FailedPrecondition, Unavailable


class EtcdUnavailable(Unavailable):
    """No member answered in time."""

    default_reason = "ETCD_UNAVAILABLE"


class EtcdRefused(FailedPrecondition):
    """etcd answered, and it was no: wrong password, no permission, or a request it can't take."""

    default_reason = "ETCD_REFUSED"


@dataclass(frozen=True, slots=True)
class EtcdConfig:
    """Where etcd is and how to show who we are."""

    endpoints: tuple[str, ...]
    """host:port of each member; a leading https:// (or a CA or client certificate) means TLS."""
    user: str = ""
    password: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    attempt_timeout_s: float = 2.0
    """Longest wait for one member's answer."""

    def __repr__(self) -> str:
        return f"EtcdConfig(endpoints={self.endpoints}, user={self.user!r})"


def credentials(config: EtcdConfig) -> grpc.ChannelCredentials | None:
    """TLS as the configuration asks for it; None: plain. Raises EtcdRefused for bad files."""
    tls = config.ca_file or config.cert_file or config.endpoints[0].startswith("https://")
    if not tls:
        return None

    def pem(path: str, what: str) -> bytes | None:
        if not path:
            return None
        try:
            return Path(path).read_bytes()
        except OSError as exc:
            raise EtcdRefused(
                f"{what} {path!r} can't be read: {exc.strerror}", reason="ETCD_TLS"
            ) from exc

    if config.cert_file:
        try:
            # gRPC says nothing of use about a certificate and key that don't belong together.
            ssl.create_default_context().load_cert_chain(config.cert_file, config.key_file or None)
        except (OSError, ssl.SSLError) as exc:
            raise EtcdRefused(
                f"etcd_cert_file {config.cert_file!r} and etcd_key_file {config.key_file!r} "
                f"are no certificate with its key: {exc.strerror or exc}",
                reason="ETCD_TLS",
            ) from exc
    return grpc.ssl_channel_credentials(
        root_certificates=pem(config.ca_file, "etcd_ca_file"),
        private_key=pem(config.key_file, "etcd_key_file"),
        certificate_chain=pem(config.cert_file, "etcd_cert_file"),
    )
