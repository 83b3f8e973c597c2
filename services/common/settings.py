"""Settings: one frozen class a service, filled from flags, then the environment, then one TOML file.

Variables are FOREBAY_<SERVICE>_<SETTING>; for settings that all services share, FOREBAY_<SETTING> does
it for all of them. The file is named by FOREBAY_CONFIG (or --config of `forebay`) and has one table a
service (`[gateway]`, `[router]`, `[worker]`) and `[shared]` for all. Nobody but this module reads the
environment.
"""

import os
import sys
import tomllib
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings.exceptions import SettingsError as UnreadableSetting

from services.common.errors import ForebayError


class SettingsError(ForebayError):
    """A setting is wrong: names the setting, its value and what would be right."""


def _split(value: object) -> object:
    return (
        tuple(p.strip() for p in value.split(",") if p.strip()) if isinstance(value, str) else value
    )


StrList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""A list of words, given as one comma-separated string or as a TOML array."""


class ServiceSettings(BaseSettings):
    """What every service can be told. Subclasses set `model_config = settings_config("router")`."""

    service: ClassVar[str] = ""

    etcd_endpoints: StrList = ("127.0.0.1:2379",)
    """etcd members, host:port each, tried in turn. Given as a comma-separated list."""
    etcd_user: str = ""
    """etcd user; empty when etcd asks for none."""
    etcd_password: str = Field(default="", repr=False)
    """etcd password."""
    etcd_ca_file: str = ""
    """PEM file of the authority that signed etcd's certificate; set it to use TLS."""
    etcd_cert_file: str = ""
    """PEM certificate that we show to etcd (mutual TLS); empty for none."""
    etcd_key_file: str = ""
    """PEM key of etcd_cert_file."""
    cluster: str = "default"
    """Cluster name: processes of different clusters don't see each other in a shared etcd."""
    lease_ttl_s: float = Field(default=10.0, ge=2)
    """Seconds after which etcd forgets a process that stopped renewing its lease."""
    host: str = "127.0.0.1"
    """Address to listen on. Loopback unless told otherwise."""
    advertise_host: str = ""
    """Host that others reach this process by; empty: `host`, or this machine's name if that is a wildcard."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of /metrics; 0 picks a free one."""
    id: str = ""
    """Stable name of this instance in the cluster; empty: a random one."""
    log_level: str = "info"
    """debug, info, warning or error."""
    log_format: str = "json"
    """json (one object a line) or text (for people)."""
    otlp_endpoint: str = ""
    """OTLP/gRPC collector for traces (http://host:4317); empty: no traces are exported."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """Longest wait for running requests after SIGTERM, in seconds."""
    ready_file: str = ""
    """File that is written (JSON: id, incarnation, pid, address, events_address, metrics_address) once ready."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments win over the environment, the environment over the file."""
        shared = EnvSettingsSource(ServiceSettings, env_prefix="FOREBAY_")
        sources: list[PydanticBaseSettingsSource] = [init_settings, env_settings, shared]
        if path := os.environ.get("FOREBAY_CONFIG"):
            for table in (cls.service, "shared"):
                sources.append(InitSettingsSource(settings_cls, _table(path, table)))
        return tuple(sources)

    @classmethod
    def load(cls, argv: Sequence[str] | None = None) -> Self:
        """Settings of this process from flags (`argv`, None: none), environment and file.

        Raises SettingsError that names the setting at fault.
        """
        try:
            if argv is None:
                return cls()
            source: Any = CliSettingsSource(
                cls, cli_parse_args=list(argv), cli_prog_name=f"python -m services.{cls.service}"
            )
            return cls(**source())
        except UnreadableSetting as exc:
            raise SettingsError(f"{exc}: {exc.__cause__}") from exc
        except ValidationError as exc:
            lines = []
            for e in exc.errors():
                name = ".".join(str(p) for p in e["loc"])
                prefix = cls.model_config.get("env_prefix", "")
                shown = "(secret)" if "password" in name or "key" in name else repr(e.get("input"))
                lines.append(
                    f"{name} (--{name.replace('_', '-')}, {prefix.upper()}{name.upper()}) is {shown}: {e['msg']}"
                )
            raise SettingsError("; ".join(lines)) from exc

    @classmethod
    def load_or_exit(cls, argv: Sequence[str] | None = None) -> Self:
        """Like `load`; prints what is wrong to stderr and exits with 2."""
        try:
            return cls.load(sys.argv[1:] if argv is None else argv)
        except SettingsError as exc:
            print(f"forebay {cls.service}: {exc.message}", file=sys.stderr)
            raise SystemExit(2) from exc


def _table(path: str, name: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file).get(name, {})
    except OSError as exc:
        raise SettingsError(
            f"FOREBAY_CONFIG names {path!r}, which can't be read: {exc.strerror}"
        ) from exc
    except tomllib.TOMLDecodeError as exc:
        raise SettingsError(f"FOREBAY_CONFIG names {path!r}, which is not TOML: {exc}") from exc
    if not isinstance(table, dict):
        raise SettingsError(f"{name!r} in {path!r} must be a table, not {type(table).__name__}")
    return table


def settings_config(service: str) -> SettingsConfigDict:
    """Configuration of a service's settings class: FOREBAY_<SERVICE>_ variables, kebab-case flags."""
    return SettingsConfigDict(
        env_prefix=f"FOREBAY_{service.upper()}_",
        frozen=True,
        extra="ignore",
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
    )
