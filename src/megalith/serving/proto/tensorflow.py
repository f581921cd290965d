"""The messages of package `tensorflow` that serving needs: tensors, their shapes and types, signatures.

Field numbers are TensorFlow's. Fields that only TensorFlow itself can use (resources, variants, composite
tensors) are left out; protobuf carries them along as unknown fields.
"""

from __future__ import annotations

from enum import IntEnum

from megalith.serving.proto.schema import Field, Map, MessageType, define, message_class


class DataType(IntEnum):
    """Types of a tensor's elements."""

    DT_INVALID = 0
    DT_FLOAT = 1
    DT_DOUBLE = 2
    DT_INT32 = 3
    DT_UINT8 = 4
    DT_INT16 = 5
    DT_INT8 = 6
    DT_STRING = 7
    DT_COMPLEX64 = 8
    DT_INT64 = 9
    DT_BOOL = 10
    DT_BFLOAT16 = 14
    DT_UINT16 = 17
    DT_COMPLEX128 = 18
    DT_HALF = 19
    DT_UINT32 = 22
    DT_UINT64 = 23


class ErrorCode(IntEnum):
    """TensorFlow's status codes, which are gRPC's."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


TYPES = "tensorflow/core/framework/types.proto"
SHAPE = "tensorflow/core/framework/tensor_shape.proto"
TENSOR = "tensorflow/core/framework/tensor.proto"
META_GRAPH = "tensorflow/core/protobuf/meta_graph.proto"
ERROR_CODES = "tensorflow/core/protobuf/error_codes.proto"

define(TYPES, "tensorflow", enums=[("DataType", DataType)])
define(ERROR_CODES, "tensorflow.error", enums=[("Code", ErrorCode)])
define(
    SHAPE,
    "tensorflow",
    messages=[
        MessageType(
            "TensorShapeProto",
            Field(2, "dim", "tensorflow.TensorShapeProto.Dim", repeated=True),
            Field(3, "unknown_rank", "bool"),
            messages=[MessageType("Dim", Field(1, "size", "int64"), Field(2, "name", "string"))],
        )
    ],
)
define(
    TENSOR,
    "tensorflow",
    imports=[SHAPE, TYPES],
    messages=[
        MessageType(
            "TensorProto",
            Field(1, "dtype", "tensorflow.DataType", is_enum=True),
            Field(2, "tensor_shape", "tensorflow.TensorShapeProto"),
            Field(3, "version_number", "int32"),
            Field(4, "tensor_content", "bytes"),
            Field(5, "float_val", "float", repeated=True),
            Field(6, "double_val", "double", repeated=True),
            Field(7, "int_val", "int32", repeated=True),
            Field(8, "string_val", "bytes", repeated=True),
            Field(9, "scomplex_val", "float", repeated=True),
            Field(10, "int64_val", "int64", repeated=True),
            Field(11, "bool_val", "bool", repeated=True),
            Field(12, "dcomplex_val", "double", repeated=True),
            Field(13, "half_val", "int32", repeated=True),
            Field(16, "uint32_val", "uint32", repeated=True),
            Field(17, "uint64_val", "uint64", repeated=True),
        )
    ],
)
define(
    META_GRAPH,
    "tensorflow",
    imports=[SHAPE, TYPES],
    messages=[
        MessageType(
            "TensorInfo",
            Field(1, "name", "string", oneof="encoding"),
            Field(2, "dtype", "tensorflow.DataType", is_enum=True),
            Field(3, "tensor_shape", "tensorflow.TensorShapeProto"),
            Field(4, "coo_sparse", "tensorflow.TensorInfo.CooSparse", oneof="encoding"),
            messages=[
                MessageType(
                    "CooSparse",
                    Field(1, "values_tensor_name", "string"),
                    Field(2, "indices_tensor_name", "string"),
                    Field(3, "dense_shape_tensor_name", "string"),
                )
            ],
        ),
        MessageType(
            "SignatureDef",
            Map(1, "inputs", "tensorflow.TensorInfo"),
            Map(2, "outputs", "tensorflow.TensorInfo"),
            Field(3, "method_name", "string"),
        ),
    ],
)

TensorShapeProto = message_class("tensorflow.TensorShapeProto")
TensorProto = message_class("tensorflow.TensorProto")
TensorInfo = message_class("tensorflow.TensorInfo")
SignatureDef = message_class("tensorflow.SignatureDef")
