"""The messages of package `monolith.parameter_sync`: what a trainer pushes, and to whom.

Field numbers are Monolith's. The syntax is proto2: a field that was set to its default is written, so a
replica id of -1 is on the wire.
"""

from __future__ import annotations

from megalith.serving.proto.schema import Field, MessageType, define, message_class

PARAMETER_SYNC = "monolith/native_training/runtime/parameter_sync/parameter_sync.proto"
_PACKAGE = "monolith.parameter_sync"
_DELTA = f"{_PACKAGE}.PushRequest.DeltaEmbeddingHashTable"

define(
    PARAMETER_SYNC,
    _PACKAGE,
    syntax="proto2",
    messages=[
        MessageType(
            "PushRequest",
            Field(1, "model_name", "string"),
            Field(2, "signature_name", "string"),
            Field(3, "delta_hash_tables", _DELTA, repeated=True),
            Field(4, "timeout_in_ms", "int64", default="1000"),
            Field(5, "delta_multi_hash_tables", _DELTA, repeated=True),
            messages=[
                MessageType(
                    "DeltaEmbeddingHashTable",
                    Field(1, "unique_id", "string"),
                    Field(2, "dim_size", "int32"),
                    Field(3, "fids", "int64", repeated=True),
                    Field(4, "embeddings", "float", repeated=True),
                )
            ],
        ),
        MessageType(
            "PushResponse",
            Field(1, "status_code", "int32"),
            Field(2, "error_message", "string"),
            Field(3, "target", "string"),
            Field(4, "update_num", "int32"),
        ),
        MessageType("PushResult", Field(1, "responses", f"{_PACKAGE}.PushResponse", repeated=True)),
        MessageType(
            "ClientConfig",
            Field(1, "model_name", "string"),
            Field(2, "signature_name", "string"),
            Field(3, "targets", "string", repeated=True),
            Field(4, "timeout_in_ms", "int64", default="1000"),
            Field(5, "targets_extra_info", f"{_PACKAGE}.ClientConfig.TargetExtraInfo", repeated=True),
            messages=[
                MessageType(
                    "TargetExtraInfo",
                    Field(1, "idc", "string"),
                    Field(2, "cluster", "string"),
                    Field(3, "replica_id", "int64", default="-1"),
                )
            ],
        ),
    ],
)

PushRequest = message_class(f"{_PACKAGE}.PushRequest")
PushResponse = message_class(f"{_PACKAGE}.PushResponse")
PushResult = message_class(f"{_PACKAGE}.PushResult")
ClientConfig = message_class(f"{_PACKAGE}.ClientConfig")
