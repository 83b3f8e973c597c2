"""Model cards, instances, holders: what discovery tells, as plain values and as protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from forebay.common.v1 import common_pb2 as pb


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """Who holds blocks: one data-parallel rank of one life of a worker (or node)."""

    id: str
    incarnation: int
    dp_rank: int = 0

    def to_proto(self) -> pb.Holder:
        """The wire form."""
        return pb.Holder(id=self.id, incarnation=self.incarnation, dp_rank=self.dp_rank)

    @classmethod
    def from_proto(cls, m: pb.Holder) -> Holder:
        """From the wire form."""
        return cls(m.id, m.incarnation, m.dp_rank)


class Role(StrEnum):
    """What a worker does in a disaggregated cluster."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class InstanceKind(StrEnum):
    """Kind of a registered process."""

    GATEWAY = "gateway"
    ROUTER = "router"
    WORKER = "worker"
    KVBM = "kvbm"
    PLANNER = "planner"


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file that gateways need: plain name, SHA-256 (32 bytes), size in bytes."""

    name: str
    sha256: bytes
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling values for requests that leave them out; None: the model states none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter served beside its base model: name, path (part of the hash), weights' SHA-256."""

    name: str
    path: str
    sha256: bytes = b""


@dataclass(frozen=True, slots=True)
class HashVector:
    """A worked example of the block hash."""

    token_ids: tuple[int, ...]
    cache_salt: str
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """All that others must know of a served model; field meanings and units as in common.proto."""

    model: str
    namespace: bytes
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    files: tuple[ModelFile, ...] = ()
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    adapters: tuple[Adapter, ...] = ()
    hash_vector: HashVector | None = None
    engine: str = ""
    created_unix_s: int = 0
    max_logprobs: int = 20
    total_blocks: int = 0

    def adapter(self, name: str) -> Adapter | None:
        """The adapter of that name, if it is served."""
        return next((a for a in self.adapters if a.name == name), None)

    def serves(self, name: str) -> bool:
        """Whether `name` is this model or one of its adapters."""
        return name == self.model or self.adapter(name) is not None

    def to_proto(self) -> pb.ModelCard:
        """The wire form."""
        d = self.defaults
        defaults = pb.GenerationDefaults(
            temperature=d.temperature,
            top_p=d.top_p,
            top_k=d.top_k,
            min_p=d.min_p,
            repetition_penalty=d.repetition_penalty,
        )
        vector = self.hash_vector
        return pb.ModelCard(
            model=self.model,
            namespace=self.namespace,
            block_size_tokens=self.block_size,
            max_model_len_tokens=self.max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            files=[
                pb.ModelFile(name=f.name, sha256=f.sha256, size_bytes=f.size_bytes)
                for f in self.files
            ],
            defaults=defaults,
            adapters=[pb.Adapter(name=a.name, path=a.path, sha256=a.sha256) for a in self.adapters],
            hash_vector=None
            if vector is None
            else pb.HashVector(
                token_ids=vector.token_ids,
                cache_salt=vector.cache_salt,
                block_hashes=vector.block_hashes,
            ),
            engine=self.engine,
            created_unix_s=self.created_unix_s,
            max_logprobs=self.max_logprobs,
            total_blocks=self.total_blocks,
        )

    @classmethod
    def from_proto(cls, m: pb.ModelCard) -> ModelCard:
        """From the wire form."""
        d = m.defaults
        return cls(
            model=m.model,
            namespace=m.namespace,
            block_size=m.block_size_tokens,
            max_model_len=m.max_model_len_tokens,
            vocab_size=m.vocab_size,
            eos_token_ids=tuple(m.eos_token_ids),
            files=tuple(ModelFile(f.name, f.sha256, f.size_bytes) for f in m.files),
            defaults=GenerationDefaults(
                temperature=d.temperature if d.HasField("temperature") else None,
                top_p=d.top_p if d.HasField("top_p") else None,
                top_k=d.top_k if d.HasField("top_k") else None,
                min_p=d.min_p if d.HasField("min_p") else None,
                repetition_penalty=d.repetition_penalty
                if d.HasField("repetition_penalty")
                else None,
            ),
            adapters=tuple(Adapter(a.name, a.path, a.sha256) for a in m.adapters),
            hash_vector=HashVector(
                tuple(m.hash_vector.token_ids),
                m.hash_vector.cache_salt,
                tuple(m.hash_vector.block_hashes),
            )
            if m.HasField("hash_vector")
            else None,
            engine=m.engine,
            created_unix_s=m.created_unix_s,
            max_logprobs=m.max_logprobs,
            total_blocks=m.total_blocks,
        )


_KINDS = {
    InstanceKind.GATEWAY: pb.INSTANCE_KIND_GATEWAY,
    InstanceKind.ROUTER: pb.INSTANCE_KIND_ROUTER,
    InstanceKind.WORKER: pb.INSTANCE_KIND_WORKER,
    InstanceKind.KVBM: pb.INSTANCE_KIND_KVBM,
    InstanceKind.PLANNER: pb.INSTANCE_KIND_PLANNER,
}
_KINDS_BACK = {v: k for k, v in _KINDS.items()}
_ROLES = {Role.BOTH: pb.ROLE_BOTH, Role.PREFILL: pb.ROLE_PREFILL, Role.DECODE: pb.ROLE_DECODE}
_ROLES_BACK: dict[int, Role] = {v: k for k, v in _ROLES.items()}


def role_to_proto(role: Role) -> pb.Role.ValueType:
    """The wire form of a role."""
    return _ROLES[role]


def role_from_proto(number: int) -> Role | None:
    """The role of that number; None for one that this version doesn't know."""
    return _ROLES_BACK.get(number)


@dataclass(frozen=True, slots=True)
class Instance:
    """What a process says of itself in discovery; fields as in common.proto's InstanceRecord."""

    id: str
    kind: InstanceKind
    incarnation: int
    address: str
    events_address: str = ""
    metrics_address: str = ""
    role: Role = Role.BOTH
    card: ModelCard | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    draining: bool = False
    dp_size: int = 1
    kvbm: str = ""
    """Id of the kvbm daemon whose tiers a worker loads from."""
    transfer: str = ""
    """How others can take KV from it; empty: not at all."""

    def to_proto(self) -> pb.InstanceRecord:
        """The wire form."""
        return pb.InstanceRecord(
            id=self.id,
            kind=_KINDS[self.kind],
            incarnation=self.incarnation,
            address=self.address,
            events_address=self.events_address,
            metrics_address=self.metrics_address,
            role=_ROLES[self.role],
            card=self.card.to_proto() if self.card else None,
            labels=dict(self.labels),
            draining=self.draining,
            dp_size=self.dp_size,
            kvbm=self.kvbm,
            transfer=self.transfer,
        )

    @classmethod
    def from_proto(cls, m: pb.InstanceRecord) -> Instance:
        """From the wire form. Raises ValueError for a kind this version doesn't know."""
        if m.kind not in _KINDS_BACK:
            raise ValueError(f"instance record {m.id!r} has unknown kind {m.kind}")
        return cls(
            id=m.id,
            kind=_KINDS_BACK[m.kind],
            incarnation=m.incarnation,
            address=m.address,
            events_address=m.events_address,
            metrics_address=m.metrics_address,
            role=_ROLES_BACK.get(m.role, Role.BOTH),
            card=ModelCard.from_proto(m.card) if m.HasField("card") else None,
            labels=dict(m.labels),
            draining=m.draining,
            dp_size=m.dp_size or 1,
            kvbm=m.kvbm,
            transfer=m.transfer,
        )
