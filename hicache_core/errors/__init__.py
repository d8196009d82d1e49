"""Every error of hicache: one base class, one subclass per cause, a stable reason code each.

A message always says who speaks, what was got, what was expected and what to do. Callers (and tests)
look at the class, its ``code`` and its typed fields, never at the sentence.
"""

from hicache_core.errors.base import (
    HiCacheError,
)
from hicache_core.errors.declarations import (
    BufferMismatchError,
    ByteSizeError,
    IncompatibleError,
    ModelFileError,
    PluginError,
    PoolsFileError,
    Reason,
    SpecError,
    TraceError,
    UnknownNameError,
)
from hicache_core.errors.device import (
    DeviceError,
    DeviceFault,
    StreamsStuckError,
    TransferError,
)
from hicache_core.errors.indices import (
    IndexRangeError,
    IndexTypeError,
    IndicesError,
    PageContractError,
    PageSizeError,
    PageTypeError,
    PairingError,
    SlotError,
    UnsupportedTokensError,
)
from hicache_core.errors.memory import (
    AddressError,
    BookedBytes,
    CapacityError,
    HostMemoryError,
    HostSizeError,
    MachineError,
    OverBudgetError,
    RegisteredTwiceError,
    RegistrationError,
    StuckRange,
    UnregisterError,
)
from hicache_core.errors.operation import (
    LiveError,
    ProbeError,
    RankError,
    SidecarError,
)

__all__ = [
    "AddressError",
    "BookedBytes",
    "BufferMismatchError",
    "ByteSizeError",
    "CapacityError",
    "DeviceError",
    "DeviceFault",
    "HiCacheError",
    "HostMemoryError",
    "HostSizeError",
    "IncompatibleError",
    "IndexRangeError",
    "IndexTypeError",
    "IndicesError",
    "LiveError",
    "MachineError",
    "ModelFileError",
    "OverBudgetError",
    "PageContractError",
    "PageSizeError",
    "PageTypeError",
    "PairingError",
    "PluginError",
    "PoolsFileError",
    "ProbeError",
    "RankError",
    "Reason",
    "RegisteredTwiceError",
    "RegistrationError",
    "SidecarError",
    "SlotError",
    "SpecError",
    "StreamsStuckError",
    "StuckRange",
    "TraceError",
    "TransferError",
    "UnknownNameError",
    "UnregisterError",
    "UnsupportedTokensError",
]
