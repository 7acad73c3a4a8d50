"""A pool on each worker from the command line: ``dask worker SCHEDULER --preload asyncmem.distributed.preload``.

On a scheduler, ``dask scheduler --preload asyncmem.distributed.preload``, it adds the page of pools to the dashboard.

Behind it stand ``--asyncmem-limit 80%`` and ``--asyncmem-device cuda:0``; the other options are variables of the
environment, `ASYNCMEM_TIMEOUT` and so on. With ``dask cuda worker`` all of them are, `ASYNCMEM_LIMIT` too: its own
preload refuses options of others.
"""

import click
from distributed import Scheduler, Worker

from asyncmem.distributed.plugin import PoolPlugin
from asyncmem.errors import InvalidRequest
from asyncmem.options import PoolOptions

__all__ = ["dask_setup"]


def _checked(context: click.Context, parameter: click.Parameter, limit: str | None) -> str | None:
    """Refuse a wrong limit when the command starts: what fails in `dask_setup` Dask only logs."""
    try:
        PoolOptions(limit=limit)
    except InvalidRequest as error:
        raise click.BadParameter(str(error), context, parameter) from error
    return limit


def _of_others(context: click.Context, _: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """Let options of other preloads pass, which Dask gives to each: dask-cuda has one, and refuses ours."""
    for word in words:
        if word.startswith("--asyncmem"):
            raise click.NoSuchOption(word, ctx=context)
    return words


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("others", nargs=-1, type=click.UNPROCESSED, callback=_of_others, expose_value=False)
@click.option("--asyncmem-limit", "limit", metavar="SIZE", callback=_checked, help='"20 GiB", "80%" or "shared".')
@click.option("--asyncmem-device", "device", metavar="NAME", default="auto", help="The device, as the worker sees it.")
async def dask_setup(dask_server: object, limit: str | None, device: str) -> None:
    """Open the pool of a worker, or add the page to a scheduler's dashboard; Dask calls this."""
    if isinstance(dask_server, Scheduler):
        from asyncmem.distributed.dashboard import add_page

        add_page(dask_server)
    if isinstance(dask_server, Worker):
        plugin = PoolPlugin(device) if limit is None else PoolPlugin(device, limit=limit)
        await dask_server.plugin_add(plugin, catch_errors=False)
