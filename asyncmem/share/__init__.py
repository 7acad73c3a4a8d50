"""Memory that goes to another process of this host without a copy.

`export` lets another process open a buffer or an array of `pool.shared`, and has the descriptor by which it does: some
bytes that travel by any channel. `attach` and `attach_async` open it there.
"""

from asyncmem.share.exports import Export, export
from asyncmem.share.imports import Attachment, attach, attach_async

__all__ = ["Attachment", "Export", "attach", "attach_async", "export"]
