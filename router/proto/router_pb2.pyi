from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("pool", "address", "pid", "host", "model_hash", "numerics_class", "layers", "experts", "capacity", "core", "protocol", "expert_bytes", "zone")
    POOL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_CLASS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    CORE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    pool: str
    address: str
    pid: int
    host: str
    model_hash: str
    numerics_class: str
    layers: int
    experts: int
    capacity: int
    core: int
    protocol: int
    expert_bytes: int
    zone: str
    def __init__(self, pool: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., model_hash: _Optional[str] = ..., numerics_class: _Optional[str] = ..., layers: _Optional[int] = ..., experts: _Optional[int] = ..., capacity: _Optional[int] = ..., core: _Optional[int] = ..., protocol: _Optional[int] = ..., expert_bytes: _Optional[int] = ..., zone: _Optional[str] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("name", "incarnation", "term", "lease_s", "renew_s", "salt")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    RENEW_S_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    term: int
    lease_s: float
    renew_s: float
    salt: int
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., term: _Optional[int] = ..., lease_s: _Optional[float] = ..., renew_s: _Optional[float] = ..., salt: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("name", "incarnation", "load", "acked", "rows", "activated", "totals", "seen", "salt")
    class LoadEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ACKED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATED_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    load: _containers.ScalarMap[str, float]
    acked: int
    rows: bytes
    activated: bytes
    totals: _containers.RepeatedCompositeFieldContainer[Totals]
    seen: int
    salt: int
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., load: _Optional[_Mapping[str, float]] = ..., acked: _Optional[int] = ..., rows: _Optional[bytes] = ..., activated: _Optional[bytes] = ..., totals: _Optional[_Iterable[_Union[Totals, _Mapping]]] = ..., seen: _Optional[int] = ..., salt: _Optional[int] = ...) -> None: ...

class Totals(_message.Message):
    __slots__ = ("peer", "rail", "counted")
    class CountedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PEER_FIELD_NUMBER: _ClassVar[int]
    RAIL_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    peer: str
    rail: str
    counted: _containers.ScalarMap[str, float]
    def __init__(self, peer: _Optional[str] = ..., rail: _Optional[str] = ..., counted: _Optional[_Mapping[str, float]] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("fenced", "incarnation", "drained", "reason", "salt")
    FENCED_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    fenced: bool
    incarnation: int
    drained: bool
    reason: str
    salt: int
    def __init__(self, fenced: _Optional[bool] = ..., incarnation: _Optional[int] = ..., drained: _Optional[bool] = ..., reason: _Optional[str] = ..., salt: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("name", "incarnation", "takes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TAKES_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    takes: FaultsTaken
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., takes: _Optional[_Union[FaultsTaken, _Mapping]] = ...) -> None: ...

class FaultsTaken(_message.Message):
    __slots__ = ("kinds", "points", "rails")
    KINDS_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    RAILS_FIELD_NUMBER: _ClassVar[int]
    kinds: _containers.RepeatedScalarFieldContainer[str]
    points: _containers.RepeatedScalarFieldContainer[str]
    rails: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kinds: _Optional[_Iterable[str]] = ..., points: _Optional[_Iterable[str]] = ..., rails: _Optional[_Iterable[str]] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("term", "epoch", "replicas_wanted", "layers", "experts", "model_hash", "members", "order", "salt", "since", "gone", "models")
    TERM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_WANTED_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    term: int
    epoch: int
    replicas_wanted: int
    layers: int
    experts: int
    model_hash: str
    members: _containers.RepeatedCompositeFieldContainer[Member]
    order: FaultOrder
    salt: int
    since: int
    gone: _containers.RepeatedScalarFieldContainer[str]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, term: _Optional[int] = ..., epoch: _Optional[int] = ..., replicas_wanted: _Optional[int] = ..., layers: _Optional[int] = ..., experts: _Optional[int] = ..., model_hash: _Optional[str] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., order: _Optional[_Union[FaultOrder, _Mapping]] = ..., salt: _Optional[int] = ..., since: _Optional[int] = ..., gone: _Optional[_Iterable[str]] = ..., models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("hash", "name", "path", "number", "base", "layers", "experts", "expert_bytes", "weight", "leaving", "asleep")
    HASH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    hash: str
    name: str
    path: str
    number: int
    base: int
    layers: int
    experts: int
    expert_bytes: int
    weight: int
    leaving: bool
    asleep: bool
    def __init__(self, hash: _Optional[str] = ..., name: _Optional[str] = ..., path: _Optional[str] = ..., number: _Optional[int] = ..., base: _Optional[int] = ..., layers: _Optional[int] = ..., experts: _Optional[int] = ..., expert_bytes: _Optional[int] = ..., weight: _Optional[int] = ..., leaving: _Optional[bool] = ..., asleep: _Optional[bool] = ...) -> None: ...

class AddModelRequest(_message.Message):
    __slots__ = ("model", "attention", "numerics_class")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_CLASS_FIELD_NUMBER: _ClassVar[int]
    model: Model
    attention: int
    numerics_class: str
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ..., attention: _Optional[int] = ..., numerics_class: _Optional[str] = ...) -> None: ...

class RemoveModelRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class FaultOrder(_message.Message):
    __slots__ = ("begin", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: Fault
    end: str
    def __init__(self, begin: _Optional[_Union[Fault, _Mapping]] = ..., end: _Optional[str] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("id", "kind", "for_s", "by_s", "times", "share", "peers", "where", "after", "rail", "seed")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FOR_S_FIELD_NUMBER: _ClassVar[int]
    BY_S_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    RAIL_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    id: str
    kind: str
    for_s: float
    by_s: float
    times: float
    share: float
    peers: _containers.RepeatedScalarFieldContainer[str]
    where: str
    after: int
    rail: str
    seed: int
    def __init__(self, id: _Optional[str] = ..., kind: _Optional[str] = ..., for_s: _Optional[float] = ..., by_s: _Optional[float] = ..., times: _Optional[float] = ..., share: _Optional[float] = ..., peers: _Optional[_Iterable[str]] = ..., where: _Optional[str] = ..., after: _Optional[int] = ..., rail: _Optional[str] = ..., seed: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("name", "pool", "state", "incarnation", "address", "pid", "host", "core", "numerics_class", "target", "serving", "load", "model")
    class LoadEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    CORE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_CLASS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    pool: str
    state: str
    incarnation: int
    address: str
    pid: int
    host: str
    core: int
    numerics_class: str
    target: bytes
    serving: bytes
    load: _containers.ScalarMap[str, float]
    model: str
    def __init__(self, name: _Optional[str] = ..., pool: _Optional[str] = ..., state: _Optional[str] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., core: _Optional[int] = ..., numerics_class: _Optional[str] = ..., target: _Optional[bytes] = ..., serving: _Optional[bytes] = ..., load: _Optional[_Mapping[str, float]] = ..., model: _Optional[str] = ...) -> None: ...

class LoadedRequest(_message.Message):
    __slots__ = ("name", "incarnation", "bitmap", "epoch", "salt", "number", "opened")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BITMAP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    bitmap: bytes
    epoch: int
    salt: int
    number: int
    opened: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., bitmap: _Optional[bytes] = ..., epoch: _Optional[int] = ..., salt: _Optional[int] = ..., number: _Optional[int] = ..., opened: _Optional[_Iterable[str]] = ...) -> None: ...

class LoadedReply(_message.Message):
    __slots__ = ("fenced", "stale")
    FENCED_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    fenced: bool
    stale: bool
    def __init__(self, fenced: _Optional[bool] = ..., stale: _Optional[bool] = ...) -> None: ...

class SuspectRequest(_message.Message):
    __slots__ = ("by", "name", "incarnation", "reason")
    BY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    by: str
    name: str
    incarnation: int
    reason: str
    def __init__(self, by: _Optional[str] = ..., name: _Optional[str] = ..., incarnation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class SuspectReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("name", "incarnation", "drain")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    drain: bool
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., drain: _Optional[bool] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportExitRequest(_message.Message):
    __slots__ = ("host", "pid", "pool")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    host: str
    pid: int
    pool: str
    def __init__(self, host: _Optional[str] = ..., pid: _Optional[int] = ..., pool: _Optional[str] = ...) -> None: ...

class ReportExitReply(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class LaunchesRequest(_message.Message):
    __slots__ = ("host", "starting")
    class StartingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HOST_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    host: str
    starting: _containers.ScalarMap[str, int]
    def __init__(self, host: _Optional[str] = ..., starting: _Optional[_Mapping[str, int]] = ...) -> None: ...

class LaunchCommand(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: str
    stop: Stop
    def __init__(self, start: _Optional[str] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("name", "pid")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    name: str
    pid: int
    def __init__(self, name: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: bool
    def __init__(self, rows: _Optional[bool] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("view", "pools", "problem", "gone", "pid", "leader", "rows", "retirements")
    class PoolsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Pool
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Pool, _Mapping]] = ...) -> None: ...
    VIEW_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    RETIREMENTS_FIELD_NUMBER: _ClassVar[int]
    view: View
    pools: _containers.MessageMap[str, Pool]
    problem: str
    gone: _containers.RepeatedCompositeFieldContainer[Gone]
    pid: int
    leader: str
    rows: bytes
    retirements: _containers.RepeatedCompositeFieldContainer[Retirement]
    def __init__(self, view: _Optional[_Union[View, _Mapping]] = ..., pools: _Optional[_Mapping[str, Pool]] = ..., problem: _Optional[str] = ..., gone: _Optional[_Iterable[_Union[Gone, _Mapping]]] = ..., pid: _Optional[int] = ..., leader: _Optional[str] = ..., rows: _Optional[bytes] = ..., retirements: _Optional[_Iterable[_Union[Retirement, _Mapping]]] = ...) -> None: ...

class RetireRequest(_message.Message):
    __slots__ = ("name", "operation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    operation: str
    def __init__(self, name: _Optional[str] = ..., operation: _Optional[str] = ...) -> None: ...

class Retirement(_message.Message):
    __slots__ = ("name", "operation", "state", "safe_to_terminate", "asked_unix_s", "waits_for", "only_here", "running")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SAFE_TO_TERMINATE_FIELD_NUMBER: _ClassVar[int]
    ASKED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    ONLY_HERE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    name: str
    operation: str
    state: str
    safe_to_terminate: bool
    asked_unix_s: float
    waits_for: str
    only_here: int
    running: int
    def __init__(self, name: _Optional[str] = ..., operation: _Optional[str] = ..., state: _Optional[str] = ..., safe_to_terminate: _Optional[bool] = ..., asked_unix_s: _Optional[float] = ..., waits_for: _Optional[str] = ..., only_here: _Optional[int] = ..., running: _Optional[int] = ...) -> None: ...

class Gone(_message.Message):
    __slots__ = ("name", "incarnation", "pid", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    pid: int
    reason: str
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., pid: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("pool", "wanted", "drain_s")
    POOL_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    pool: str
    wanted: int
    drain_s: float
    def __init__(self, pool: _Optional[str] = ..., wanted: _Optional[int] = ..., drain_s: _Optional[float] = ...) -> None: ...

class ScaleReply(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: Pool
    def __init__(self, pool: _Optional[_Union[Pool, _Mapping]] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("wanted", "live", "starting", "draining", "least", "most", "held_up")
    WANTED_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    HELD_UP_FIELD_NUMBER: _ClassVar[int]
    wanted: int
    live: int
    starting: int
    draining: int
    least: int
    most: int
    held_up: str
    def __init__(self, wanted: _Optional[int] = ..., live: _Optional[int] = ..., starting: _Optional[int] = ..., draining: _Optional[int] = ..., least: _Optional[int] = ..., most: _Optional[int] = ..., held_up: _Optional[str] = ...) -> None: ...

class InjectRequest(_message.Message):
    __slots__ = ("names", "fault")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    fault: Fault
    def __init__(self, names: _Optional[_Iterable[str]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ...) -> None: ...

class InjectReply(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ClearReply(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ids: _Optional[_Iterable[str]] = ...) -> None: ...

class FaultsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FaultsReply(_message.Message):
    __slots__ = ("injections",)
    INJECTIONS_FIELD_NUMBER: _ClassVar[int]
    injections: _containers.RepeatedCompositeFieldContainer[Injection]
    def __init__(self, injections: _Optional[_Iterable[_Union[Injection, _Mapping]]] = ...) -> None: ...

class Injection(_message.Message):
    __slots__ = ("fault", "names", "began_s", "ends_s", "remaining_s")
    FAULT_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    BEGAN_S_FIELD_NUMBER: _ClassVar[int]
    ENDS_S_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    fault: Fault
    names: _containers.RepeatedScalarFieldContainer[str]
    began_s: float
    ends_s: float
    remaining_s: float
    def __init__(self, fault: _Optional[_Union[Fault, _Mapping]] = ..., names: _Optional[_Iterable[str]] = ..., began_s: _Optional[float] = ..., ends_s: _Optional[float] = ..., remaining_s: _Optional[float] = ...) -> None: ...
