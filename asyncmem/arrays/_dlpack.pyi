from typing import Final, final

from typing_extensions import CapsuleType as CapsuleType

READ_ONLY: Final = 1
COPIED: Final = 2

def legacy_capsule(
    owner: object, address: int, shape: tuple[int, ...], dtype: tuple[int, int, int], device: tuple[int, int]
) -> CapsuleType: ...
def versioned_capsule(
    owner: object,
    address: int,
    shape: tuple[int, ...],
    dtype: tuple[int, int, int],
    device: tuple[int, int],
    flags: int = 0,
) -> CapsuleType: ...

@final
class Loan:
    @property
    def address(self) -> int: ...
    @property
    def device(self) -> tuple[int, int]: ...
    @property
    def dtype(self) -> tuple[int, int, int]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...] | None: ...
    @property
    def readonly(self) -> bool: ...

def receive(capsule: object) -> Loan: ...
