"""Cards, instances and holders survive the way over protobuf and protobuf JSON, in every field."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from forebay.common.v1 import common_pb2 as pb
from google.protobuf import json_format

from services.common.cards import (
    Adapter,
    GenerationDefaults,
    HashVector,
    Holder,
    Instance,
    InstanceKind,
    ModelCard,
    ModelFile,
    Role,
    role_to_proto,
)

CARD = ModelCard(
    model="org/model",
    namespace=bytes(range(32)),
    block_size=32,
    max_model_len=8192,
    vocab_size=151_936,
    eos_token_ids=(2, 7),
    files=(ModelFile("tokenizer.json", b"\x01" * 32, 1 << 33), ModelFile("x", b"\x02" * 32, 0)),
    defaults=GenerationDefaults(0.6, 0.95, 20, 0.05, 1.1),
    adapters=(Adapter("sql", "/adapters/1", b"\x03" * 32),),
    hash_vector=HashVector((1, 2, 3, 4), "salt", (b"\x04" * 32, b"\x05" * 32)),
    engine="vllm 0.32.0",
    created_unix_s=1_700_000_000,
    max_logprobs=5,
    total_blocks=1 << 40,
)
WORKER = Instance(
    id="w1",
    kind=InstanceKind.WORKER,
    incarnation=2**64 - 1,
    address="127.0.0.1:8200",
    events_address="tcp://127.0.0.1:8201",
    metrics_address="127.0.0.1:8202",
    role=Role.DECODE,
    card=CARD,
    labels={"zone": "a", "leer": ""},
    draining=True,
    dp_size=4,
    kvbm="n1",
    transfer="nixl",
)


def assert_all_fields_differ_from_defaults(value: Any) -> None:
    """So that a field that is forgotten on the way can't hide behind its default."""
    for field in dataclasses.fields(value):
        if field.default is not dataclasses.MISSING:
            assert getattr(value, field.name) != field.default, field.name


@pytest.mark.parametrize("value", [CARD, WORKER, CARD.defaults, CARD.adapters[0]])
def test_examples_are_complete(value: Any) -> None:
    assert_all_fields_differ_from_defaults(value)


@pytest.mark.parametrize("message", [CARD.to_proto(), WORKER.to_proto()])
def test_every_field_of_the_message_is_set(message: Any) -> None:
    assert {f.name for f, _ in message.ListFields()} == set(message.DESCRIPTOR.fields_by_name)


def test_card_round_trip() -> None:
    assert (
        ModelCard.from_proto(pb.ModelCard.FromString(CARD.to_proto().SerializeToString())) == CARD
    )


def test_instance_round_trip_over_json() -> None:
    text = json_format.MessageToJson(WORKER.to_proto())
    assert Instance.from_proto(json_format.Parse(text, pb.InstanceRecord())) == WORKER


def test_golden_record() -> None:
    """What stands in etcd, where other versions of us read it."""
    golden = json.loads((Path(__file__).parent / "golden" / "instance.json").read_text())
    assert json_format.MessageToDict(WORKER.to_proto()) == golden
    assert Instance.from_proto(json_format.ParseDict(golden, pb.InstanceRecord())) == WORKER


def test_plain_instance_round_trip() -> None:
    plain = Instance("g", InstanceKind.GATEWAY, 1, "h:1")
    assert Instance.from_proto(plain.to_proto()) == plain


def test_absent_defaults_stay_absent_and_zero_stays_zero() -> None:
    card = dataclasses.replace(
        CARD, defaults=GenerationDefaults(temperature=0.0, top_k=0), hash_vector=None
    )
    back = ModelCard.from_proto(card.to_proto())
    assert back.defaults == GenerationDefaults(0.0, None, 0, None, None)
    assert back.hash_vector is None


@pytest.mark.parametrize("kind", InstanceKind)
def test_every_kind_round_trips(kind: InstanceKind) -> None:
    assert Instance.from_proto(Instance("x", kind, 1, "h:1").to_proto()).kind is kind


@pytest.mark.parametrize("role", Role)
def test_every_role_round_trips(role: Role) -> None:
    instance = dataclasses.replace(WORKER, role=role)
    assert instance.to_proto().role == role_to_proto(role)
    assert Instance.from_proto(instance.to_proto()).role is role


def test_unknown_kind_is_an_error_that_names_it() -> None:
    message = WORKER.to_proto()
    message.kind = 99  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"'w1'.*99"):
        Instance.from_proto(message)


def test_unset_role_and_ranks_are_read_as_documented() -> None:
    message = pb.InstanceRecord(id="w", kind=pb.INSTANCE_KIND_WORKER)
    instance = Instance.from_proto(message)
    assert (instance.role, instance.dp_size, instance.card) == (Role.BOTH, 1, None)


def test_holder_round_trip_and_order() -> None:
    holder = Holder("w", 2**63, 3)
    assert Holder.from_proto(holder.to_proto()) == holder
    assert sorted([Holder("b", 1), Holder("a", 2), Holder("a", 1, 1), Holder("a", 1)]) == [
        Holder("a", 1),
        Holder("a", 1, 1),
        Holder("a", 2),
        Holder("b", 1),
    ]


def test_card_serves_itself_and_its_adapters() -> None:
    assert CARD.serves("org/model") and CARD.serves("sql") and not CARD.serves("other")
    assert CARD.adapter("sql") is CARD.adapters[0] and CARD.adapter("org/model") is None
