"""The documentation site: `tox -e docs -- html` writes it, and fails on any warning."""

import datetime as dt
import sys
import types

from sphinx.application import Sphinx

import asyncmem

project = "asyncmem"
author = "The asyncmem maintainers"
copyright = author  # noqa: A001  # Sphinx's name for it
version = release = asyncmem.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
exclude_patterns = ["_build"]
nitpicky = True
# Types of other projects, whose inventories are not at hand without a network, and our own that have no entry.
nitpick_ignore_regex = [("py:.*", r"(?!asyncmem\.).*"), ("py:.*", r"asyncmem\.(\w+\.)+\w+")]
# A word of a docstring's `Attributes:` may be one of several classes; no link is better than a guess.
suppress_warnings = ["ref.python"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# Docstrings say `name` as Markdown does, because editors show that well.
default_role = "code"
autodoc_default_options = {
    "members": True,
    "inherited-members": "ABC,BaseException,IntEnum,Protocol,WorkerPlugin,dict,int,object,tuple",
    "show-inheritance": True,
}
autodoc_member_order = "bysource"
# asyncmem.interop.cupy takes the address of a compiled function of CuPy's, for which any capsule will do.
_streams = types.ModuleType("cupy_backends.cuda.stream")
vars(_streams)["__pyx_capi__"] = {"get_current_stream_ptr": vars(dt)["datetime_CAPI"]}
sys.modules[_streams.__name__] = _streams
autodoc_mock_imports = ["cupy", "numba", "rmm", "torch"]
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

highlight_language = "none"
smartquotes = False  # "--device" is two dashes
html_theme = "furo"
html_title = f"asyncmem {release}"
html_show_sphinx = False
html_copy_source = False


def read_fences(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Make blocks of code of the fences in a docstring, which editors show well, too."""
    del app, what, name, obj, options
    inside = False
    for place, line in enumerate(lines):
        if line.lstrip().startswith("```"):
            lines[place] = "" if inside else line.replace("```", ".. code-block:: ") + "\n"
            inside = not inside
        elif inside:
            lines[place] = f"   {line}"
    lines[:] = "\n".join(lines).split("\n")


def setup(app: Sphinx) -> None:
    """Have docstrings read."""
    app.connect("autodoc-process-docstring", read_fences)
