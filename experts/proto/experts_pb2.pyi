from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("name", "incarnation", "server_incarnation", "model_hash", "layers", "experts", "hidden", "top_k", "dtype", "reply_descriptor", "lanes", "slots", "slot_bytes", "wire_version", "weight")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SERVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    REPLY_DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    server_incarnation: int
    model_hash: str
    layers: int
    experts: int
    hidden: int
    top_k: int
    dtype: int
    reply_descriptor: bytes
    lanes: int
    slots: int
    slot_bytes: int
    wire_version: int
    weight: int
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., server_incarnation: _Optional[int] = ..., model_hash: _Optional[str] = ..., layers: _Optional[int] = ..., experts: _Optional[int] = ..., hidden: _Optional[int] = ..., top_k: _Optional[int] = ..., dtype: _Optional[int] = ..., reply_descriptor: _Optional[bytes] = ..., lanes: _Optional[int] = ..., slots: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., wire_version: _Optional[int] = ..., weight: _Optional[int] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("request_descriptor", "server_incarnation", "cores", "rings_lanes", "wire_version")
    REQUEST_DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    SERVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    RINGS_LANES_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    request_descriptor: bytes
    server_incarnation: int
    cores: _containers.RepeatedScalarFieldContainer[int]
    rings_lanes: bool
    wire_version: int
    def __init__(self, request_descriptor: _Optional[bytes] = ..., server_incarnation: _Optional[int] = ..., cores: _Optional[_Iterable[int]] = ..., rings_lanes: _Optional[bool] = ..., wire_version: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("server_incarnation", "model_hash")
    SERVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    server_incarnation: int
    model_hash: str
    def __init__(self, server_incarnation: _Optional[int] = ..., model_hash: _Optional[str] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("config", "model_hash")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    config: bytes
    model_hash: str
    def __init__(self, config: _Optional[bytes] = ..., model_hash: _Optional[str] = ...) -> None: ...

class ManifestRequest(_message.Message):
    __slots__ = ("server_incarnation", "model_hash")
    SERVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    server_incarnation: int
    model_hash: str
    def __init__(self, server_incarnation: _Optional[int] = ..., model_hash: _Optional[str] = ...) -> None: ...

class ManifestReply(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    def __init__(self, manifest: _Optional[bytes] = ...) -> None: ...

class GiveRequest(_message.Message):
    __slots__ = ("opening", "piece")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    opening: GiveOpening
    piece: Piece
    def __init__(self, opening: _Optional[_Union[GiveOpening, _Mapping]] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ...) -> None: ...

class GiveOpening(_message.Message):
    __slots__ = ("server_incarnation", "identity", "descriptor")
    SERVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    server_incarnation: int
    identity: bytes
    descriptor: bytes
    def __init__(self, server_incarnation: _Optional[int] = ..., identity: _Optional[bytes] = ..., descriptor: _Optional[bytes] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("sequence", "layer", "expert", "offset", "nbytes")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    layer: int
    expert: int
    offset: int
    nbytes: int
    def __init__(self, sequence: _Optional[int] = ..., layer: _Optional[int] = ..., expert: _Optional[int] = ..., offset: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class GiveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
