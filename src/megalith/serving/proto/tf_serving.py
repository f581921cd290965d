"""The messages and services of package `tensorflow.serving`: predict, model metadata, model status.

Field numbers are TF Serving's. Classify, Regress and MultiInference are not served, so they are not here.
"""

from __future__ import annotations

from megalith.serving.model_state import ModelState
from megalith.serving.proto import tensorflow
from megalith.serving.proto.schema import (
    Field,
    Map,
    MessageType,
    Service,
    define,
    define_well_known,
    message_class,
)

MODEL = "tensorflow_serving/apis/model.proto"
PREDICT = "tensorflow_serving/apis/predict.proto"
METADATA = "tensorflow_serving/apis/get_model_metadata.proto"
STATUS = "tensorflow_serving/util/status.proto"
MODEL_STATUS = "tensorflow_serving/apis/get_model_status.proto"
PREDICTION_SERVICE = "tensorflow_serving/apis/prediction_service.proto"
MODEL_SERVICE = "tensorflow_serving/apis/model_service.proto"
_PACKAGE = "tensorflow.serving"
_MODEL_SPEC = "tensorflow.serving.ModelSpec"

define_well_known("any_pb2")
define_well_known("wrappers_pb2")
define(
    MODEL,
    _PACKAGE,
    imports=["google/protobuf/wrappers.proto"],
    messages=[
        MessageType(
            "ModelSpec",
            Field(1, "name", "string"),
            Field(2, "version", "google.protobuf.Int64Value", oneof="version_choice"),
            Field(3, "signature_name", "string"),
            Field(4, "version_label", "string", oneof="version_choice"),
        )
    ],
)
define(
    PREDICT,
    _PACKAGE,
    imports=[tensorflow.TENSOR, MODEL],
    messages=[
        MessageType(
            "PredictRequest",
            Field(1, "model_spec", _MODEL_SPEC),
            Map(2, "inputs", "tensorflow.TensorProto"),
            Field(3, "output_filter", "string", repeated=True),
        ),
        MessageType(
            "PredictResponse",
            Map(1, "outputs", "tensorflow.TensorProto"),
            Field(2, "model_spec", _MODEL_SPEC),
        ),
    ],
)
define(
    METADATA,
    _PACKAGE,
    imports=["google/protobuf/any.proto", tensorflow.META_GRAPH, MODEL],
    messages=[
        MessageType("SignatureDefMap", Map(1, "signature_def", "tensorflow.SignatureDef")),
        MessageType(
            "GetModelMetadataRequest",
            Field(1, "model_spec", _MODEL_SPEC),
            Field(2, "metadata_field", "string", repeated=True),
        ),
        MessageType(
            "GetModelMetadataResponse",
            Field(1, "model_spec", _MODEL_SPEC),
            Map(2, "metadata", "google.protobuf.Any"),
        ),
    ],
)
define(
    STATUS,
    _PACKAGE,
    imports=[tensorflow.ERROR_CODES],
    messages=[
        MessageType(
            "StatusProto",
            Field(1, "error_code", "tensorflow.error.Code", is_enum=True),
            Field(2, "error_message", "string"),
        )
    ],
)
define(
    MODEL_STATUS,
    _PACKAGE,
    imports=[MODEL, STATUS],
    messages=[
        MessageType("GetModelStatusRequest", Field(1, "model_spec", _MODEL_SPEC)),
        MessageType(
            "ModelVersionStatus",
            Field(1, "version", "int64"),
            Field(2, "state", "tensorflow.serving.ModelVersionStatus.State", is_enum=True),
            Field(3, "status", "tensorflow.serving.StatusProto"),
            enums=[("State", ModelState)],
        ),
        MessageType(
            "GetModelStatusResponse",
            Field(1, "model_version_status", "tensorflow.serving.ModelVersionStatus", repeated=True),
        ),
    ],
)
define(
    PREDICTION_SERVICE,
    _PACKAGE,
    imports=[PREDICT, METADATA],
    services=[
        Service(
            "PredictionService",
            [
                ("Predict", f"{_PACKAGE}.PredictRequest", f"{_PACKAGE}.PredictResponse"),
                (
                    "GetModelMetadata",
                    f"{_PACKAGE}.GetModelMetadataRequest",
                    f"{_PACKAGE}.GetModelMetadataResponse",
                ),
            ],
        )
    ],
)
define(
    MODEL_SERVICE,
    _PACKAGE,
    imports=[MODEL_STATUS],
    services=[
        Service(
            "ModelService",
            [
                (
                    "GetModelStatus",
                    f"{_PACKAGE}.GetModelStatusRequest",
                    f"{_PACKAGE}.GetModelStatusResponse",
                )
            ],
        )
    ],
)

ModelSpec = message_class(_MODEL_SPEC)
PredictRequest = message_class("tensorflow.serving.PredictRequest")
PredictResponse = message_class("tensorflow.serving.PredictResponse")
SignatureDefMap = message_class("tensorflow.serving.SignatureDefMap")
GetModelMetadataRequest = message_class("tensorflow.serving.GetModelMetadataRequest")
GetModelMetadataResponse = message_class("tensorflow.serving.GetModelMetadataResponse")
StatusProto = message_class("tensorflow.serving.StatusProto")
GetModelStatusRequest = message_class("tensorflow.serving.GetModelStatusRequest")
ModelVersionStatus = message_class("tensorflow.serving.ModelVersionStatus")
GetModelStatusResponse = message_class("tensorflow.serving.GetModelStatusResponse")
