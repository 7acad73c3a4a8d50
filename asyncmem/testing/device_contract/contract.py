"""All that every device promises."""

from asyncmem.testing.device_contract.fences import AwaitingContract, FencesContract, NoticesContract
from asyncmem.testing.device_contract.memory import ClockContract, CopiesContract, SegmentsContract
from asyncmem.testing.device_contract.streams import ClosingContract, StreamsContract


class DeviceContract(
    ClockContract,
    SegmentsContract,
    CopiesContract,
    FencesContract,
    NoticesContract,
    AwaitingContract,
    StreamsContract,
    ClosingContract,
):
    """What every device promises. The class that takes it over has a fixture `rig`."""
