"""The examples run, and find their own results right."""

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.may_block  # some import torch or CuPy where that is there

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_says_what_it_shows(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each example is a program that checks its own result and prints a few lines about it."""
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_the_examples_are_there() -> None:
    """The examples that the README and the pages name exist."""
    assert [path.stem for path in EXAMPLES] == [
        "async_data_pipeline",
        "gpu_pipeline",
        "kv_cache_serving",
        "multi_tensor",
        "parallel_processes",
        "pipeline_parallel",
        "see_memory",
        "share_arrays",
        "share_between_processes",
        "spill",
        "torch_server",
    ]
