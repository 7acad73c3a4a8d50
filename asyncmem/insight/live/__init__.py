"""A running process shows its pools to programs of the same user: `server` answers, `client` asks.

`place` is where they meet, a socket in a folder that only the user can enter; `look` is what is said.
"""

from asyncmem.insight.live.server import LiveServer, serve_live

__all__ = ["LiveServer", "serve_live"]
