from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ("client_version",)
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    client_version: str
    def __init__(self, client_version: _Optional[str] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("server_version", "profile", "switch_ip", "udp_port", "loopback")
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    SWITCH_IP_FIELD_NUMBER: _ClassVar[int]
    UDP_PORT_FIELD_NUMBER: _ClassVar[int]
    LOOPBACK_FIELD_NUMBER: _ClassVar[int]
    server_version: str
    profile: str
    switch_ip: str
    udp_port: int
    loopback: bool
    def __init__(self, server_version: _Optional[str] = ..., profile: _Optional[str] = ..., switch_ip: _Optional[str] = ..., udp_port: _Optional[int] = ..., loopback: bool = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("job", "world_size", "rank", "incarnation", "ip", "udp_port", "mtu", "receive_frames", "wait_seconds", "client_version")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    IP_FIELD_NUMBER: _ClassVar[int]
    UDP_PORT_FIELD_NUMBER: _ClassVar[int]
    MTU_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_FRAMES_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    job: str
    world_size: int
    rank: int
    incarnation: int
    ip: str
    udp_port: int
    mtu: int
    receive_frames: int
    wait_seconds: float
    client_version: str
    def __init__(self, job: _Optional[str] = ..., world_size: _Optional[int] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., ip: _Optional[str] = ..., udp_port: _Optional[int] = ..., mtu: _Optional[int] = ..., receive_frames: _Optional[int] = ..., wait_seconds: _Optional[float] = ..., client_version: _Optional[str] = ...) -> None: ...

class RetransmissionPolicy(_message.Message):
    __slots__ = ("initial_seconds", "min_seconds", "max_seconds", "deadline_seconds", "early_resend")
    INITIAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EARLY_RESEND_FIELD_NUMBER: _ClassVar[int]
    initial_seconds: float
    min_seconds: float
    max_seconds: float
    deadline_seconds: float
    early_resend: int
    def __init__(self, initial_seconds: _Optional[float] = ..., min_seconds: _Optional[float] = ..., max_seconds: _Optional[float] = ..., deadline_seconds: _Optional[float] = ..., early_resend: _Optional[int] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("epoch", "or_slots", "add_slots", "endpoint_ip", "endpoint_port", "policy", "members", "lease_seconds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OR_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ADD_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_IP_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_PORT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    or_slots: int
    add_slots: int
    endpoint_ip: str
    endpoint_port: int
    policy: RetransmissionPolicy
    members: _containers.RepeatedCompositeFieldContainer[Member]
    lease_seconds: float
    def __init__(self, epoch: _Optional[int] = ..., or_slots: _Optional[int] = ..., add_slots: _Optional[int] = ..., endpoint_ip: _Optional[str] = ..., endpoint_port: _Optional[int] = ..., policy: _Optional[_Union[RetransmissionPolicy, _Mapping]] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., lease_seconds: _Optional[float] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("rank", "host", "ip", "udp_port", "switch_port")
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    IP_FIELD_NUMBER: _ClassVar[int]
    UDP_PORT_FIELD_NUMBER: _ClassVar[int]
    SWITCH_PORT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    host: str
    ip: str
    udp_port: int
    switch_port: int
    def __init__(self, rank: _Optional[int] = ..., host: _Optional[str] = ..., ip: _Optional[str] = ..., udp_port: _Optional[int] = ..., switch_port: _Optional[int] = ...) -> None: ...

class ProgressReport(_message.Message):
    __slots__ = ("job", "epoch", "rank", "submitted", "completed", "trouble")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: int
    rank: int
    submitted: int
    completed: int
    trouble: Trouble
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ..., submitted: _Optional[int] = ..., completed: _Optional[int] = ..., trouble: _Optional[_Union[Trouble, _Mapping]] = ...) -> None: ...

class Trouble(_message.Message):
    __slots__ = ("code", "message", "bucket")
    class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[Trouble.Code]
        MISMATCH: _ClassVar[Trouble.Code]
        STALLED: _ClassVar[Trouble.Code]
        INTEGRITY: _ClassVar[Trouble.Code]
        REFUSED: _ClassVar[Trouble.Code]
        ABORTED: _ClassVar[Trouble.Code]
    UNSPECIFIED: Trouble.Code
    MISMATCH: Trouble.Code
    STALLED: Trouble.Code
    INTEGRITY: Trouble.Code
    REFUSED: Trouble.Code
    ABORTED: Trouble.Code
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    code: Trouble.Code
    message: str
    bucket: int
    def __init__(self, code: _Optional[_Union[Trouble.Code, str]] = ..., message: _Optional[str] = ..., bucket: _Optional[int] = ...) -> None: ...

class Directive(_message.Message):
    __slots__ = ("fence", "peer_left", "registered")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    PEER_LEFT_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    peer_left: PeerLeft
    registered: Registered
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ..., peer_left: _Optional[_Union[PeerLeft, _Mapping]] = ..., registered: _Optional[_Union[Registered, _Mapping]] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Fence(_message.Message):
    __slots__ = ("reason", "message", "ranks", "bucket")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[Fence.Reason]
        WORKER_LOST: _ClassVar[Fence.Reason]
        MISMATCH: _ClassVar[Fence.Reason]
        STALLED: _ClassVar[Fence.Reason]
        INTEGRITY: _ClassVar[Fence.Reason]
        REFUSED: _ClassVar[Fence.Reason]
        SUPERSEDED: _ClassVar[Fence.Reason]
        SWITCH_LOST: _ClassVar[Fence.Reason]
        ABORTED: _ClassVar[Fence.Reason]
    UNSPECIFIED: Fence.Reason
    WORKER_LOST: Fence.Reason
    MISMATCH: Fence.Reason
    STALLED: Fence.Reason
    INTEGRITY: Fence.Reason
    REFUSED: Fence.Reason
    SUPERSEDED: Fence.Reason
    SWITCH_LOST: Fence.Reason
    ABORTED: Fence.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    reason: Fence.Reason
    message: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    bucket: int
    def __init__(self, reason: _Optional[_Union[Fence.Reason, str]] = ..., message: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., bucket: _Optional[int] = ...) -> None: ...

class PeerLeft(_message.Message):
    __slots__ = ("rank", "submitted")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    submitted: int
    def __init__(self, rank: _Optional[int] = ..., submitted: _Optional[int] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("job", "epoch", "rank")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: int
    rank: int
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("switch", "jobs", "server_version", "uptime_seconds")
    SWITCH_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    switch: SwitchStatus
    jobs: _containers.RepeatedCompositeFieldContainer[JobStatus]
    server_version: str
    uptime_seconds: float
    def __init__(self, switch: _Optional[_Union[SwitchStatus, _Mapping]] = ..., jobs: _Optional[_Iterable[_Union[JobStatus, _Mapping]]] = ..., server_version: _Optional[str] = ..., uptime_seconds: _Optional[float] = ...) -> None: ...

class SwitchStatus(_message.Message):
    __slots__ = ("address", "device_id", "connected", "primary", "profile", "slots")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    address: str
    device_id: int
    connected: bool
    primary: bool
    profile: str
    slots: int
    def __init__(self, address: _Optional[str] = ..., device_id: _Optional[int] = ..., connected: bool = ..., primary: bool = ..., profile: _Optional[str] = ..., slots: _Optional[int] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job", "state", "epoch", "world_size", "incarnation", "pool_base", "pool_size", "workers", "reason", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    POOL_BASE_FIELD_NUMBER: _ClassVar[int]
    POOL_SIZE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    job: str
    state: str
    epoch: int
    world_size: int
    incarnation: int
    pool_base: int
    pool_size: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    reason: str
    counters: _containers.ScalarMap[str, int]
    def __init__(self, job: _Optional[str] = ..., state: _Optional[str] = ..., epoch: _Optional[int] = ..., world_size: _Optional[int] = ..., incarnation: _Optional[int] = ..., pool_base: _Optional[int] = ..., pool_size: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., reason: _Optional[str] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("member", "state", "submitted", "completed", "silent_seconds")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    SILENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    member: Member
    state: str
    submitted: int
    completed: int
    silent_seconds: float
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., state: _Optional[str] = ..., submitted: _Optional[int] = ..., completed: _Optional[int] = ..., silent_seconds: _Optional[float] = ...) -> None: ...

class PoolsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PoolsReply(_message.Message):
    __slots__ = ("pools", "slots")
    POOLS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    slots: int
    def __init__(self, pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ..., slots: _Optional[int] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("base", "size", "job", "epoch")
    BASE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    base: int
    size: int
    job: str
    epoch: int
    def __init__(self, base: _Optional[int] = ..., size: _Optional[int] = ..., job: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...
