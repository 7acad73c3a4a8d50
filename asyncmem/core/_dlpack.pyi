from typing_extensions import CapsuleType as CapsuleType

def legacy_capsule(
    owner: object, address: int, shape: tuple[int, ...], dtype: tuple[int, int, int], device: tuple[int, int]
) -> CapsuleType: ...
def versioned_capsule(
    owner: object, address: int, shape: tuple[int, ...], dtype: tuple[int, int, int], device: tuple[int, int]
) -> CapsuleType: ...
