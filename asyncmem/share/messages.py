"""What two processes say to each other about memory, and what a descriptor is."""

import struct
from typing import Final

TOKEN: Final = 16
"""Bytes of a process's token, its socket's name."""
KEY: Final = 16
"""Bytes of an export's key."""
DESCRIPTOR: Final = struct.Struct(f"<4s{TOKEN}s{KEY}s")
"""The version, the exporter's token, and the key. Nobody can guess either."""
VERSION: Final = b"\xa5am\x01"

# What messages begin with: the importer's three, and the exporter's three.
OPEN, FREE, CLOSED, OPENED, REFUSED, DROP = b"OFCARD"

OPEN_MESSAGE: Final = struct.Struct(f"<BI{KEY}s")
"""The request's number, and the key."""
FREE_MESSAGE: Final = struct.Struct("<BQ")
"""The number of what was opened."""
OPENED_MESSAGE: Final = struct.Struct("<BIQ")
"""The request's number, and that of what was opened. JSON follows, and a file where it is the first of its group."""
REFUSED_MESSAGE: Final = struct.Struct("<BI")
"""The request's number. The reason follows."""
DROP_MESSAGE: Final = struct.Struct("<BQ")
"""The number of a region that is used no more."""
CLOSED_MESSAGE: Final = struct.Struct("<BQ")
"""The number of a region that is closed."""
