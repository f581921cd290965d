"""Proto: the messages of TF Serving, the Open Inference Protocol v2 and Monolith's parameter sync.

Public names, packages and field numbers, made at run time without generated code; tensors to and from them.
Needs protobuf: `pip install megalith[serve]`.
"""

from megalith.serving.proto.infer_tensors import (
    datatype_of,
    from_infer_request,
    from_raw,
    from_values,
    to_infer_request,
)
from megalith.serving.proto.inference import (
    InferParameter,
    InferTensorContents,
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataRequest,
    ModelMetadataResponse,
    ModelReadyRequest,
    ModelReadyResponse,
    ServerLiveRequest,
    ServerLiveResponse,
    ServerMetadataRequest,
    ServerMetadataResponse,
    ServerReadyRequest,
    ServerReadyResponse,
)
from megalith.serving.proto.limits import MAX_BYTES
from megalith.serving.proto.parameter_sync import ClientConfig, PushRequest, PushResponse, PushResult
from megalith.serving.proto.schema import POOL, Message
from megalith.serving.proto.tensorflow import (
    DataType,
    ErrorCode,
    SignatureDef,
    TensorInfo,
    TensorProto,
    TensorShapeProto,
)
from megalith.serving.proto.tf_serving import (
    GetModelMetadataRequest,
    GetModelMetadataResponse,
    GetModelStatusRequest,
    GetModelStatusResponse,
    ModelSpec,
    ModelVersionStatus,
    PredictRequest,
    PredictResponse,
    SignatureDefMap,
    StatusProto,
)
from megalith.serving.proto.tf_tensors import (
    Strings,
    from_tensor_proto,
    from_tensor_protos,
    strings_from_tensor_proto,
    strings_to_tensor_proto,
    tensor_info,
    to_tensor_proto,
)

__all__ = [
    "MAX_BYTES",
    "POOL",
    "ClientConfig",
    "DataType",
    "ErrorCode",
    "GetModelMetadataRequest",
    "GetModelMetadataResponse",
    "GetModelStatusRequest",
    "GetModelStatusResponse",
    "InferParameter",
    "InferTensorContents",
    "Message",
    "ModelInferRequest",
    "ModelInferResponse",
    "ModelMetadataRequest",
    "ModelMetadataResponse",
    "ModelReadyRequest",
    "ModelReadyResponse",
    "ModelSpec",
    "ModelVersionStatus",
    "PredictRequest",
    "PredictResponse",
    "PushRequest",
    "PushResponse",
    "PushResult",
    "ServerLiveRequest",
    "ServerLiveResponse",
    "ServerMetadataRequest",
    "ServerMetadataResponse",
    "ServerReadyRequest",
    "ServerReadyResponse",
    "SignatureDef",
    "SignatureDefMap",
    "StatusProto",
    "Strings",
    "TensorInfo",
    "TensorProto",
    "TensorShapeProto",
    "datatype_of",
    "from_infer_request",
    "from_raw",
    "from_tensor_proto",
    "from_tensor_protos",
    "from_values",
    "strings_from_tensor_proto",
    "strings_to_tensor_proto",
    "tensor_info",
    "to_infer_request",
    "to_tensor_proto",
]
