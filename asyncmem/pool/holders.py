"""Who holds the memory that others wait for, and at which level it is short: for errors and warnings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncmem.facts import OwnerInfo
from asyncmem.figures import format_size
from asyncmem.pool.alarm import waiting_site
from asyncmem.pool.owners import held_by, label

if TYPE_CHECKING:
    from collections.abc import Collection

    from asyncmem.core import Request
    from asyncmem.pool.ports import AnyShare, Opened

_TAGS = 5


def waiting_owner(
    opened: Opened, number: int, request: Request[Any] | None, *, held: int, waiting: int, age: float
) -> OwnerInfo:
    """Return an owner that waits, with its name and the line of the program where it does."""
    owner = opened.core.named(number)
    site = getattr(request, "_site", None) or (waiting_site(owner) if owner is not None else None)
    name = label(owner) if number else "nobody yet"
    return OwnerInfo(owner=name, held=held, waiting=waiting, age=age, site=site or "")


def short_of(opened: Opened, share: AnyShare, nbytes: int) -> AnyShare:
    """Return the innermost level that has no room for a request in a share: itself, or one around it, or the pool."""
    core = opened.core
    for one in share.lineage():
        full = opened.shares.get(one._account) is one and nbytes > one.own_limit() - core.account(one._account).live
        if full or one.is_lease:  # nothing around a lease bounds what lies in it
            return one
    return opened.pool


def held_beside(opened: Opened, share: AnyShare, waiting: Collection[int] = ()) -> dict[str, int]:
    """Return the bytes of a share's live buffers by what holds them, besides the waiting owners."""
    core = opened.core
    accounts = _accounts(opened, share, whole=False)
    held = held_by(core, accounts)
    rows = {label(core.named(owner)): nbytes for owner, nbytes in held.items() if owner and owner not in waiting}
    known = sum(nbytes for owner, nbytes in held.items() if owner)
    others = "held in no block, or granted and never awaited"
    if share is opened.pool:
        figures = {
            "pinned": opened.pins.nbytes,
            "kept for captured graphs": opened.captures.nbytes,
            "spillable, and in no use": opened.spilling.resting_bytes(),
        }
        rows |= figures
        known += sum(figures.values()) + core.exported_bytes
    else:
        others += ", or pinned, exported or spillable"
    rows[others] = core.account(share._account).live - known
    return {what: nbytes for what, nbytes in rows.items() if nbytes > 0}


def tags_of(opened: Opened, share: AnyShare, most: int = _TAGS) -> list[tuple[str, int]]:
    """Return the tags that hold most of a share, with their bytes, largest first."""
    accounts = None if share is opened.pool else _accounts(opened, share, whole=True)
    return list(opened.core.tag_bytes(accounts).items())[:most]


def shortage(opened: Opened, share: AnyShare, waiting: Collection[int]) -> str:
    """Say in lines that a share is full, and who holds what of it besides the waiting owners."""
    live = opened.core.account(share._account).live
    tags = ", ".join(f"{tag!r} {format_size(nbytes)}" for tag, nbytes in tags_of(opened, share))
    head = f"{share.level}: limit {format_size(share.own_limit())}, live {format_size(live)}"
    head += f" ({tags})" if tags else ""
    rows = held_beside(opened, share, waiting)
    if share is opened.pool:
        rows["freed while exported"] = opened.core.exported_bytes
        rows["more, spilled to the host"] = opened.spilling.nbytes
    return "\n".join([head, *(f"  {format_size(nbytes)} {what}" for what, nbytes in rows.items() if nbytes)])


def _accounts(opened: Opened, share: AnyShare, *, whole: bool) -> set[int]:
    """Return the accounts of a share and its parts; those inside of a lease only for itself, or where `whole`."""
    return {
        account
        for account, one in list(opened.shares.items())
        if share in one.lineage() and (whole or share.has_range or not one.has_range)
    }
