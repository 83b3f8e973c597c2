"""Settings: one frozen class a service, filled from flags, the environment, then one TOML file.

Variables are FOREBAY_<SERVICE>_<SETTING>; for settings that all services share, FOREBAY_<SETTING>
does it for all of them. The file is named by FOREBAY_CONFIG and has one table a service
(`[gateway]`, `[router]`, `[worker]`) and `[shared]` for all. Nobody but this module reads the
environment.
"""

import os
import re
import sys
import tomllib
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
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
from services.common.net import advertised_host, host_port

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ENDPOINT = re.compile(r"(https?://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}")
_SECRET = re.compile(r"password|secret|token|api_key")


class SettingsError(ForebayError):
    """A setting is wrong: names the setting, its value and what would be right."""


def _split(value: object) -> object:
    if not isinstance(value, str):
        return value
    return tuple(p.strip() for p in value.split(",") if p.strip())


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


StrList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""A list of words, given as one comma-separated string or as a TOML array."""

LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)]
"""Name of a log level, in any case."""


class ServiceSettings(BaseSettings):
    """What every service can be told. Subclasses set `model_config = settings_config("router")`."""

    model_config = SettingsConfigDict(use_attribute_docstrings=True)
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
    """Host that others reach us by; empty: `host`, or this machine's name if that is a wildcard."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of /metrics; 0 picks a free one."""
    id: str = ""
    """Stable name of this instance in the cluster; empty: a random one."""
    log_level: LogLevel = "info"
    """debug, info, warning or error."""
    log_format: Literal["json", "text"] = "json"
    """json (one object a line) or text (for people)."""
    otlp_endpoint: str = ""
    """OTLP/gRPC collector for traces (http://host:4317); empty: no traces are exported."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """Longest wait for running requests after SIGTERM, in seconds."""
    ready_file: str = ""
    """File that is written once ready: id, incarnation, pid and addresses, as JSON."""

    def advertised(self, port: int) -> str:
        """host:port that others reach a listener of this process on `port` by."""
        return host_port(advertised_host(self.host, self.advertise_host), port)

    @field_validator("etcd_endpoints")
    @classmethod
    def _endpoints(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("must name at least one etcd member, host:port")
        for endpoint in value:
            if not _ENDPOINT.fullmatch(endpoint):
                raise ValueError(f"must be host:port with commas between; {endpoint!r} is not")
        return value

    @field_validator("cluster", "id")
    @classmethod
    def _word(cls, value: str) -> str:
        if value and not _NAME.fullmatch(value):
            raise ValueError(
                "must be up to 128 letters, digits, dots, dashes and underscores, no mark first"
            )
        return value

    @field_validator("etcd_ca_file", "etcd_cert_file", "etcd_key_file")
    @classmethod
    def _file(cls, value: str) -> str:
        if value and not os.access(value, os.R_OK):
            raise ValueError("must name a PEM file that this process can read")
        return value

    @model_validator(mode="after")
    def _etcd_identity(self) -> Self:
        if bool(self.etcd_cert_file) != bool(self.etcd_key_file):
            raise ValueError("etcd_cert_file and etcd_key_file must be given together")
        if self.etcd_password and not self.etcd_user:
            raise ValueError("etcd_password must come with etcd_user")
        if not self.cluster:
            raise ValueError("cluster must not be empty")
        return self

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
            for table, owner in ((cls.service, cls), ("shared", ServiceSettings)):
                found = _table(path, table)
                for name in found.keys() - owner.model_fields.keys():
                    raise SettingsError(f"[{table}] in {path!r} has no setting {name!r}")
                sources.append(InitSettingsSource(settings_cls, found))
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
            raise SettingsError("; ".join(cls._complaint(dict(e)) for e in exc.errors())) from None

    @classmethod
    def load_or_exit(cls, argv: Sequence[str] | None = None) -> Self:
        """Like `load`; prints what is wrong to stderr and exits with 2."""
        try:
            return cls.load(sys.argv[1:] if argv is None else argv)
        except SettingsError as exc:
            print(f"forebay {cls.service}: {exc.message}", file=sys.stderr)
            raise SystemExit(2) from exc

    @classmethod
    def _complaint(cls, error: dict[str, Any]) -> str:
        """One line on one wrong setting; values of secret ones are not shown."""
        said = str(error["msg"]).removeprefix("Value error, ")
        if not error["loc"]:
            # About several settings at once: its input is all of them, secrets too.
            return said
        name = str(error["loc"][0])
        variables = [f"{cls.model_config.get('env_prefix', '')}{name}".upper()]
        if name in ServiceSettings.model_fields:
            variables.append(f"FOREBAY_{name}".upper())
        where = f"{name} (--{name.replace('_', '-')}, {', '.join(variables)})"
        value = error.get("input")
        if error["type"] == "missing":
            return f"{where} is required"
        if isinstance(value, str) and value.startswith("tcp://") and "port" in name:
            said += " (set by Kubernetes for a Service of that name? Use enableServiceLinks: false)"
        return f"{where} is {'(secret)' if _SECRET.search(name) else repr(value)}: {said}"


def _table(path: str, name: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file).get(name, {})
    except OSError as exc:
        raise SettingsError(
            f"FOREBAY_CONFIG names {path!r}, which can't be read: {exc.strerror}"
        ) from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise SettingsError(f"FOREBAY_CONFIG names {path!r}, which is not TOML: {exc}") from exc
    if not isinstance(table, dict):
        raise SettingsError(f"{name!r} in {path!r} must be a table, not {type(table).__name__}")
    return table


def settings_config(service: str) -> SettingsConfigDict:
    """Configuration of a service's settings class: FOREBAY_<SERVICE>_ variables, kebab flags."""
    return SettingsConfigDict(
        env_prefix=f"FOREBAY_{service.upper()}_",
        frozen=True,
        extra="ignore",
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
    )
