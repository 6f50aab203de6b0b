"""The documentation site: ``make docs`` builds it into ``site/``, and every warning is an error."""

from dspark_store import __version__

project = "dspark-store"
copyright = "the dspark-store authors"  # noqa: A001 # Sphinx's own name
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
napoleon_numpy_docstring = False
napoleon_use_ivar = True
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "dspark-store"
html_show_sphinx = False
html_theme_options = {"footer_icons": []}

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3  # the anchors that the pages' links use are those of GitHub
myst_links_external_new_tab = False

default_role = "code"  # in docstrings a name stands between single backquotes, as in Markdown
autodoc_default_options = {"members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
python_maximum_signature_line_length = 100
