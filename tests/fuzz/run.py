"""Fuzz the readers of files with Atheris, which looks where a change of the input leads in the program.

    python tests/fuzz/run.py                        all harnesses, together for an hour
    python tests/fuzz/run.py --seconds 60 plan      some of them
    python tests/fuzz/run.py plan FILE...           just these inputs, without Atheris

What is found lies in `.fuzz/NAME-crash-...`, what led to new places in `.fuzz/corpus/NAME`.
"""

import argparse
import subprocess
import sys
from pathlib import Path

FUZZ = Path(__file__).parent
FOUND = Path(".fuzz")
SLOW_SECONDS, MOST_MIB = 10, 2048
"""What one input may take; it has some kilobytes."""


def main() -> int:
    """Do what the command line says; return 1 where a reader raised what it may not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME | NAME FILE...")
    parser.add_argument("--seconds", type=int, default=3600, help="for all harnesses together")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process: one that ends it
    given = parser.parse_args()
    sys.path.insert(0, str(FUZZ))
    if given.here:
        return _fuzz(given.names[0], given.seconds)
    import harnesses

    names, files = [*harnesses.HARNESSES], [Path(one) for one in given.names if one not in harnesses.HARNESSES]
    if given.names:
        names = [one for one in given.names if one in harnesses.HARNESSES]
    if files:
        for file in files:
            harnesses.HARNESSES[names[0]](file.read_bytes())
        return 0
    ends = [_run(name, max(1, given.seconds // len(names))) for name in names]
    print(*(f"{'failed' if end else 'passed'}  {name}" for name, end in zip(names, ends, strict=True)), sep="\n")  # noqa: T201
    return int(any(ends))


def _run(name: str, seconds: int) -> int:
    return subprocess.run([sys.executable, __file__, "--here", "--seconds", str(seconds), name], check=False).returncode


def _fuzz(name: str, seconds: int) -> int:
    import atheris

    with atheris.instrument_imports(include=["asyncmem.insight", "asyncmem.planning", "asyncmem.replay"]):
        import harnesses
    corpus, seeds = FOUND / "corpus" / name, FOUND / "seeds" / name
    for folder in (corpus, seeds):
        folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(harnesses.seeds(name)):
        (seeds / str(number)).write_bytes(seed)
    kept = FUZZ / "corpus" / name
    folders = [corpus, seeds, *([kept] if kept.is_dir() else [])]
    limits = [f"-max_total_time={seconds}", f"-timeout={SLOW_SECONDS}", f"-rss_limit_mb={MOST_MIB}", "-max_len=4096"]
    limits.append(f"-artifact_prefix={FOUND}/{name}-")
    atheris.Setup([sys.argv[0], *limits, *map(str, folders)], harnesses.HARNESSES[name])
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
