"""Sphinx settings. Builds offline; `make docs` turns every warning into an error."""

# ruff: noqa: E402 (what this imports needs the lines before it)

import inspect
import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
# autodoc imports the package, and needs no accelerator for that
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(HERE))

import config_reference
import docstrings
import model_table

import tunix_lite

project = "tunix_lite"
author = "the tunix_lite authors"
version = release = tunix_lite.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "mathml"]
html_math_renderer = "mathml"
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
# the log is a file of the repository and no page
exclude_patterns = ["_build", "generated", "log.md", "Thumbs.db", ".DS_Store"]

html_theme = "furo"
html_title = "tunix_lite"
html_show_sphinx = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
copybutton_prompt_text = "$ "

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "exclude-members": "replace"}


# Pages with a part that is made of code. It is made before autodoc replaces the defaults of the
# same functions by texts (autodoc_preserve_defaults).
GENERATED = (config_reference, model_table)
RENDERED = {made.PAGE: made.render() for made in GENERATED}
# a paragraph of links to modules
LISTED = re.compile(r"^\[`.*(?:\n.+)*", re.MULTILINE)


def fill(app, page, source):
    """Puts what is generated where its marker stands."""
    for made in GENERATED:
        if page == made.PAGE:
            assert made.MARKER in source[0], f"{page} has lost its marker"
            source[0] = source[0].replace(made.MARKER, RENDERED[page])
    if page == "api/internals":
        source[0] = re.sub(LISTED, lambda links: links[0] + docstrings_of(links[0]), source[0])


def docstrings_of(links: str) -> str:
    """A section with the docstrings of each module that a list of links names."""
    modules = [
        file.replace("/", ".") for file in re.findall(r"\(\.\./\.\./(\S+)\.py\)", links)
    ]
    block = "\n\n### `{0}`\n\n```{{eval-rst}}\n.. automodule:: {0}\n```"
    return "".join(block.format(module) for module in modules)


def set_history_apart(app, env):
    """Decisions say what was true on their day: no search and no menu has them. The page about the
    project links to them."""
    for page in env.found_docs:
        if page.startswith("decisions/"):
            env.metadata[page] |= {"nosearch": "true", "orphan": "true"}
    return []


def skip_defaults(app, what, name, obj, skip, options):
    """A function that is the default of a field is not a method."""
    return (
        True
        if what == "class" and inspect.isfunction(obj) and "." not in obj.__qualname__
        else None
    )


def setup(app):
    app.connect("source-read", fill)
    app.connect("env-updated", set_history_apart)
    app.connect("autodoc-skip-member", skip_defaults)
    # so read them every time
    app.connect("env-get-outdated", lambda *_: [made.PAGE for made in GENERATED])
    app.connect("autodoc-process-docstring", docstrings.as_rst)
