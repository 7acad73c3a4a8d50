"""The promises of the device contract, as tests: if you write a device, run them over it by pytest.

A test class takes them over, and says how a device is made and kept busy::

    class TestContract(DeviceContract):
        @pytest.fixture
        def rig(self):
            device = MyDevice()
            gate = threading.Event()
            yield Rig(device, occupy=lambda stream: stream.run(gate.wait), release=gate.set)
            gate.set()
            device.close()

A device with pages takes over `PagesContract` too, one with memory of the host beside it `PinnedContract`. Failures say
more after ``pytest.register_assert_rewrite("asyncmem.testing.device_contract")`` in a conftest. pytest is needed here
alone: nothing else of asyncmem imports it.
"""

from asyncmem.testing.device_contract.contract import DeviceContract, Rig
from asyncmem.testing.device_contract.pages import PagesContract
from asyncmem.testing.device_contract.pinned import PinnedContract

__all__ = ["DeviceContract", "PagesContract", "PinnedContract", "Rig"]
