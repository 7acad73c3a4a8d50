"""The page of names from elsewhere leads to names that are here, with the defaults that hold."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import asyncmem
from asyncmem import devices, insight, pipeline, planning, replay
from asyncmem.options import OPTIONS, PoolOptions
from asyncmem.stats import DERIVED

PAGE = (Path(__file__).parents[2] / "docs" / "names-elsewhere.md").read_text(encoding="utf-8")
HERE = {
    *OPTIONS,
    *DERIVED,
    *(one.name for one in fields(asyncmem.PoolStats)),
    *(name for module in (asyncmem, devices, insight, pipeline, planning, replay) for name in module.__all__),
    *(
        name
        for kind in (
            asyncmem.insight.AllocationTracker,
            asyncmem.AsyncMemoryPool,
            asyncmem.PoolStats,
            asyncmem.BucketPool,
            asyncmem.Buffer,
            asyncmem.devices.Stream,
            insight.ReuseSuggestions,
            PoolOptions,
            pipeline.Prefetcher,
            asyncmem.runtime.RuntimeDevice,
        )
        for name in dir(kind)
    ),
    *("ASYNCMEM_", "ASYNCMEM_CONF", "max_pooled_per_bucket", "ahead", "workers", "pinned", "tag"),
    *("asyncmem", "devices", "pipeline", "insight", "planning", "replay", "seconds", "pool", "options", "direct"),
    *("interop", "use", "rmm", "memory_resource"),
}
"""Names that the page may use for what is here; a word of prose in code is none."""
PROSE = {
    *("RuntimeError", "True", "OPTION", "buffer", "with", "as", "recorder", "size", "count", "plan", "suggestions"),
    *("estimate", "auto", "need", "host", "best_fit", "cuda", "advise"),
    *("n", "s", "t", "b", "array", "tensor", "other", "shape", "dtype", "stats", "async", "export", "to", "torch"),
    *("stream_ordered", "paged", "keep", "cupy"),
}


def cells() -> Iterator[str]:
    """The last column of all tables."""
    for line in PAGE.splitlines():
        if line.startswith("|") and not line.startswith(("|---", "| there")):
            yield line.strip("|").split("|")[-1].strip()


def test_every_name_is_here() -> None:
    """As an option, a figure, or a part of what the package exports."""
    named = {
        word for cell in cells() for code in re.findall(r"`([^`]*)`", cell) for word in re.findall(r"[A-Za-z_]+", code)
    }
    assert len(named) > 40
    assert not named - HERE - PROSE


def test_defaults_are_those_that_hold() -> None:
    """Where an option's value stands beside it."""
    found = [one for cell in cells() for one in re.findall(r'`(\w+)`, (\d[\w.% ]*|"\w+"|on\b|off\b)', cell)]
    stated = {name: text.strip('" ') for name, text in found if name in OPTIONS}
    assert len(stated) >= 10
    for name, text in stated.items():
        value = {"on": True, "off": False}.get(text, text)
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        assert getattr(PoolOptions(**{name: value}), name) == getattr(PoolOptions(), name), name  # type: ignore[arg-type]  # any option
