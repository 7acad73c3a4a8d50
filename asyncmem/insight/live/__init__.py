"""A running process shows its pools to programs of the same user: `server` answers, `client` asks."""

from asyncmem.insight.live.server import LiveServer, serve_live

__all__ = ["LiveServer", "serve_live"]
