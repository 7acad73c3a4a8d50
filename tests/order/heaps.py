"""The heaps that every promise here is held to: the compiled one and its twin."""

from typing import cast

from asyncmem.core import Heap
from tests.reference import ReferenceHeap

from .program import FullHeap

HEAPS: dict[str, type[FullHeap]] = {
    "compiled": cast("type[FullHeap]", Heap),
    "twin": cast("type[FullHeap]", ReferenceHeap),
}
