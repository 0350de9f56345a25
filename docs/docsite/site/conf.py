"""Configure Sphinx: one site for the guides (Markdown) and the reference (antsibull-docs), laid out by `./dev docs`."""

import re

project = "grove.sandbox"
copyright = "the grove.sandbox authors"
extensions = ["myst_parser", "sphinx_antsibull_ext"]
html_theme = "alabaster"
html_title = project
html_sidebars = {"**": ["about.html", "navigation.html", "searchbox.html"]}
html_theme_options = {"page_width": "1100px", "sidebar_width": "240px", "fixed_sidebar": True}
html_show_sphinx = False
html_copy_source = False
# The same anchors as on the forge that also shows the guides.
myst_heading_anchors = 4


def setup(app):
    app.connect("source-read", unlink_outside)


def unlink_outside(app, page, text):
    """Replace links to files outside the guides with their text, because those files are not part of the site."""
    text[0] = re.sub(r"\[([^]]+)\]\(\.\./[^)]*\)", r"\1", text[0])
