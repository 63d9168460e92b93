from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Path(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PATH_UNSPECIFIED: _ClassVar[Path]
    PATH_SWITCH: _ClassVar[Path]
    PATH_RING: _ClassVar[Path]
PATH_UNSPECIFIED: Path
PATH_SWITCH: Path
PATH_RING: Path

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
    __slots__ = ("job", "world_size", "rank", "incarnation", "ip", "udp_port", "mtu", "receive_frames", "wait_seconds", "client_version", "mode", "ring", "nonce", "slots_min", "slots_want")
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
    MODE_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_MIN_FIELD_NUMBER: _ClassVar[int]
    SLOTS_WANT_FIELD_NUMBER: _ClassVar[int]
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
    mode: str
    ring: bool
    nonce: bytes
    slots_min: int
    slots_want: int
    def __init__(self, job: _Optional[str] = ..., world_size: _Optional[int] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., ip: _Optional[str] = ..., udp_port: _Optional[int] = ..., mtu: _Optional[int] = ..., receive_frames: _Optional[int] = ..., wait_seconds: _Optional[float] = ..., client_version: _Optional[str] = ..., mode: _Optional[str] = ..., ring: bool = ..., nonce: _Optional[bytes] = ..., slots_min: _Optional[int] = ..., slots_want: _Optional[int] = ...) -> None: ...

class RetransmissionPolicy(_message.Message):
    __slots__ = ("initial_seconds", "min_seconds", "max_seconds", "deadline_seconds", "early_resend", "silent_seconds", "fallback_seconds", "window")
    INITIAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EARLY_RESEND_FIELD_NUMBER: _ClassVar[int]
    SILENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    initial_seconds: float
    min_seconds: float
    max_seconds: float
    deadline_seconds: float
    early_resend: int
    silent_seconds: float
    fallback_seconds: float
    window: int
    def __init__(self, initial_seconds: _Optional[float] = ..., min_seconds: _Optional[float] = ..., max_seconds: _Optional[float] = ..., deadline_seconds: _Optional[float] = ..., early_resend: _Optional[int] = ..., silent_seconds: _Optional[float] = ..., fallback_seconds: _Optional[float] = ..., window: _Optional[int] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("epoch", "endpoint_ip", "endpoint_port", "policy", "members", "lease_seconds", "order", "credential")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_IP_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_PORT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    endpoint_ip: str
    endpoint_port: int
    policy: RetransmissionPolicy
    members: _containers.RepeatedCompositeFieldContainer[Member]
    lease_seconds: float
    order: Order
    credential: bytes
    def __init__(self, epoch: _Optional[int] = ..., endpoint_ip: _Optional[str] = ..., endpoint_port: _Optional[int] = ..., policy: _Optional[_Union[RetransmissionPolicy, _Mapping]] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., lease_seconds: _Optional[float] = ..., order: _Optional[_Union[Order, _Mapping]] = ..., credential: _Optional[bytes] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("number", "why", "run_switch", "run_ring", "stop", "trial", "hold")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    RUN_SWITCH_FIELD_NUMBER: _ClassVar[int]
    RUN_RING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TRIAL_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    number: int
    why: str
    run_switch: RunSwitch
    run_ring: RunRing
    stop: Stop
    trial: Trial
    hold: Hold
    def __init__(self, number: _Optional[int] = ..., why: _Optional[str] = ..., run_switch: _Optional[_Union[RunSwitch, _Mapping]] = ..., run_ring: _Optional[_Union[RunRing, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., trial: _Optional[_Union[Trial, _Mapping]] = ..., hold: _Optional[_Union[Hold, _Mapping]] = ...) -> None: ...

class RunSwitch(_message.Message):
    __slots__ = ("epoch", "or_slots", "add_slots", "first_bucket")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OR_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ADD_SLOTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BUCKET_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    or_slots: int
    add_slots: int
    first_bucket: int
    def __init__(self, epoch: _Optional[int] = ..., or_slots: _Optional[int] = ..., add_slots: _Optional[int] = ..., first_bucket: _Optional[int] = ...) -> None: ...

class RunRing(_message.Message):
    __slots__ = ("epoch", "first_bucket")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_BUCKET_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    first_bucket: int
    def __init__(self, epoch: _Optional[int] = ..., first_bucket: _Optional[int] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class Trial(_message.Message):
    __slots__ = ("epoch", "or_slots", "add_slots")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OR_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ADD_SLOTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    or_slots: int
    add_slots: int
    def __init__(self, epoch: _Optional[int] = ..., or_slots: _Optional[int] = ..., add_slots: _Optional[int] = ...) -> None: ...

class Hold(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Answer(_message.Message):
    __slots__ = ("order", "bucket", "failed", "message")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    order: int
    bucket: int
    failed: bool
    message: str
    def __init__(self, order: _Optional[int] = ..., bucket: _Optional[int] = ..., failed: bool = ..., message: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("job", "epoch", "rank", "submitted", "completed", "trouble", "answer", "silent_seconds", "present", "counters", "rtt_seconds")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    SILENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    RTT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: int
    rank: int
    submitted: int
    completed: int
    trouble: Trouble
    answer: Answer
    silent_seconds: float
    present: int
    counters: _containers.ScalarMap[str, int]
    rtt_seconds: float
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ..., submitted: _Optional[int] = ..., completed: _Optional[int] = ..., trouble: _Optional[_Union[Trouble, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., silent_seconds: _Optional[float] = ..., present: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., rtt_seconds: _Optional[float] = ...) -> None: ...

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
    __slots__ = ("fence", "peer_left", "registered", "order", "report_now", "policy")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    PEER_LEFT_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    REPORT_NOW_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    fence: Fence
    peer_left: PeerLeft
    registered: Registered
    order: Order
    report_now: ReportNow
    policy: RetransmissionPolicy
    def __init__(self, fence: _Optional[_Union[Fence, _Mapping]] = ..., peer_left: _Optional[_Union[PeerLeft, _Mapping]] = ..., registered: _Optional[_Union[Registered, _Mapping]] = ..., order: _Optional[_Union[Order, _Mapping]] = ..., report_now: _Optional[_Union[ReportNow, _Mapping]] = ..., policy: _Optional[_Union[RetransmissionPolicy, _Mapping]] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportNow(_message.Message):
    __slots__ = ("completed",)
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    completed: int
    def __init__(self, completed: _Optional[int] = ...) -> None: ...

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
        EVICTED: _ClassVar[Fence.Reason]
    UNSPECIFIED: Fence.Reason
    WORKER_LOST: Fence.Reason
    MISMATCH: Fence.Reason
    STALLED: Fence.Reason
    INTEGRITY: Fence.Reason
    REFUSED: Fence.Reason
    SUPERSEDED: Fence.Reason
    SWITCH_LOST: Fence.Reason
    ABORTED: Fence.Reason
    EVICTED: Fence.Reason
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
    __slots__ = ("job", "epoch", "rank", "submitted", "wait_seconds")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: int
    rank: int
    submitted: int
    wait_seconds: float
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ..., submitted: _Optional[int] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

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
    __slots__ = ("address", "device_id", "connected", "primary", "profile", "slots", "name", "drained", "trouble", "connected_seconds", "guarded", "refused")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GUARDED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    address: str
    device_id: int
    connected: bool
    primary: bool
    profile: str
    slots: int
    name: str
    drained: bool
    trouble: str
    connected_seconds: float
    guarded: int
    refused: int
    def __init__(self, address: _Optional[str] = ..., device_id: _Optional[int] = ..., connected: bool = ..., primary: bool = ..., profile: _Optional[str] = ..., slots: _Optional[int] = ..., name: _Optional[str] = ..., drained: bool = ..., trouble: _Optional[str] = ..., connected_seconds: _Optional[float] = ..., guarded: _Optional[int] = ..., refused: _Optional[int] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job", "state", "epoch", "world_size", "incarnation", "pool_base", "pool_size", "workers", "reason", "counters", "mode", "path", "present", "ring", "path_reason", "policy", "or_slots", "add_slots", "fallbacks", "promotions", "over_seconds")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FallbacksEntry(_message.Message):
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
    MODE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    PATH_REASON_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    OR_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ADD_SLOTS_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    PROMOTIONS_FIELD_NUMBER: _ClassVar[int]
    OVER_SECONDS_FIELD_NUMBER: _ClassVar[int]
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
    mode: str
    path: Path
    present: int
    ring: bool
    path_reason: str
    policy: RetransmissionPolicy
    or_slots: int
    add_slots: int
    fallbacks: _containers.ScalarMap[str, int]
    promotions: int
    over_seconds: float
    def __init__(self, job: _Optional[str] = ..., state: _Optional[str] = ..., epoch: _Optional[int] = ..., world_size: _Optional[int] = ..., incarnation: _Optional[int] = ..., pool_base: _Optional[int] = ..., pool_size: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., reason: _Optional[str] = ..., counters: _Optional[_Mapping[str, int]] = ..., mode: _Optional[str] = ..., path: _Optional[_Union[Path, str]] = ..., present: _Optional[int] = ..., ring: bool = ..., path_reason: _Optional[str] = ..., policy: _Optional[_Union[RetransmissionPolicy, _Mapping]] = ..., or_slots: _Optional[int] = ..., add_slots: _Optional[int] = ..., fallbacks: _Optional[_Mapping[str, int]] = ..., promotions: _Optional[int] = ..., over_seconds: _Optional[float] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("member", "state", "submitted", "completed", "silent_seconds", "rtt_seconds", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    SILENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RTT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    member: Member
    state: str
    submitted: int
    completed: int
    silent_seconds: float
    rtt_seconds: float
    counters: _containers.ScalarMap[str, int]
    def __init__(self, member: _Optional[_Union[Member, _Mapping]] = ..., state: _Optional[str] = ..., submitted: _Optional[int] = ..., completed: _Optional[int] = ..., silent_seconds: _Optional[float] = ..., rtt_seconds: _Optional[float] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("job", "interval_seconds")
    JOB_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    job: str
    interval_seconds: float
    def __init__(self, job: _Optional[str] = ..., interval_seconds: _Optional[float] = ...) -> None: ...

class SetModeRequest(_message.Message):
    __slots__ = ("job", "mode")
    JOB_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    job: str
    mode: str
    def __init__(self, job: _Optional[str] = ..., mode: _Optional[str] = ...) -> None: ...

class SetModeReply(_message.Message):
    __slots__ = ("mode", "before")
    MODE_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    mode: str
    before: str
    def __init__(self, mode: _Optional[str] = ..., before: _Optional[str] = ...) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("job", "policy", "zero")
    JOB_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    ZERO_FIELD_NUMBER: _ClassVar[int]
    job: str
    policy: RetransmissionPolicy
    zero: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, job: _Optional[str] = ..., policy: _Optional[_Union[RetransmissionPolicy, _Mapping]] = ..., zero: _Optional[_Iterable[str]] = ...) -> None: ...

class SetPolicyReply(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: RetransmissionPolicy
    def __init__(self, policy: _Optional[_Union[RetransmissionPolicy, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("switch", "undrain")
    SWITCH_FIELD_NUMBER: _ClassVar[int]
    UNDRAIN_FIELD_NUMBER: _ClassVar[int]
    switch: str
    undrain: bool
    def __init__(self, switch: _Optional[str] = ..., undrain: bool = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("moving", "staying")
    MOVING_FIELD_NUMBER: _ClassVar[int]
    STAYING_FIELD_NUMBER: _ClassVar[int]
    moving: _containers.RepeatedScalarFieldContainer[str]
    staying: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, moving: _Optional[_Iterable[str]] = ..., staying: _Optional[_Iterable[str]] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class EvictReply(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

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
