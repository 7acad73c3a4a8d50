"""The `asyncmem` command, one file a command; `app` has the group.

It needs click and rich, and msgspec for files of records; the extra `cli` installs them. Nothing else in asyncmem
imports from here.
"""

import sys

_OPTIONAL = ("click", "rich")


def main() -> int:
    """Run the command line of this process, and return its exit code.

    0 is success, 1 a failure that the text names, 2 a mistake in the command line or an option, 130 an interruption.
    """
    try:
        import rich  # noqa: F401 -- what the commands need is missed before one of them is imported

        from asyncmem.cli.app import app
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in _OPTIONAL:
            raise
        sys.stderr.write(
            f"asyncmem: the command line needs {package}, which is not installed.\n"
            "Install it with: pip install 'asyncmem[cli]'\n"
        )
        return 1
    except KeyboardInterrupt:
        return 130
    return app()
