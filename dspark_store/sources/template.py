"""Chat templates: which one is meant, and what it can do."""

import json
import logging
from functools import lru_cache
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser

from dspark_store.sources.source import SourceError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A template is a program that runs on user data, so these are what a row that does not suit it can raise.
RENDER_ERRORS = (TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)

logger = logging.getLogger(__name__)


def apply_chat_template_option(tokenizer: "PreTrainedTokenizerBase", value: str | PathLike[str] | None) -> None:
    """Set the tokenizer's chat template from what the user gave.

    Text that holds `{%` or `{{` is the template itself. The name of one of several templates that the tokenizer has
    is that one. A path to a file is replaced by the file's text or, if that is JSON with the key `chat_template`, by
    that entry. None keeps the tokenizer's own.

    Raises:
        SourceError: the value is neither, or it is None and the tokenizer has no template of its own.

    """
    if value is None:
        require_chat_template(tokenizer)
        return
    if isinstance(value, str) and _looks_like_jinja(value):
        tokenizer.chat_template = value
        return
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if value in named:
        tokenizer.chat_template = named[value]
        return
    path = Path(fspath(value))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"chat template {path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise SourceError(
            f"chat template {str(path)!r} is neither a file that can be read nor Jinja "
            f"(it holds no {{% or {{{{){_names(named)}: {error.strerror or error}"
        ) from error
    template = _template_in(text)
    if not any(map(_looks_like_jinja, template.values() if isinstance(template, dict) else [template])):
        logger.warning("chat template %s holds no Jinja: every conversation will be rendered as the same text", path)
    tokenizer.chat_template = template


def require_chat_template(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise SourceError if the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        raise SourceError(
            "no chat template: the tokenizer has none of its own; give one with the chat template option "
            "(a file or inline Jinja)"
        )


@lru_cache(maxsize=16)
def has_generation_tags(template: str) -> bool:
    """Tell whether a template marks what the assistant says, with `{% generation %}` in any spelling Jinja accepts.

    transformers teaches Jinja that tag through an extension; so does this, and then asks the parser. A tag in a
    comment or a raw block does not count.

    Raises:
        SourceError: the template is not valid Jinja.

    """
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension])
    try:
        tree = environment.parse(template)
    except TemplateSyntaxError as error:
        raise SourceError(f"the chat template is not valid Jinja: {error.message} (line {error.lineno})") from error
    tags = tree.find_all(nodes.ExtensionAttribute)
    return any(tag.identifier == _GenerationTag.identifier for tag in tags)


def refuses_system_role(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Tell whether the template raises on a system message and renders the same conversation without it."""
    user = {"role": "user", "content": "a"}
    try:
        tokenizer.apply_chat_template([{"role": "system", "content": "b"}, user], tokenize=False)
    except RENDER_ERRORS:
        pass
    else:
        return False
    try:
        tokenizer.apply_chat_template([user], tokenize=False)
    except RENDER_ERRORS:
        return False
    return True


class _GenerationTag(Extension):
    """Parses `{% generation %}...{% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("said"), [], [], body).set_lineno(line)


def _names(templates: dict[str, str]) -> str:
    return f" nor one of the tokenizer's templates ({', '.join(templates)})" if templates else ""


def _looks_like_jinja(text: str) -> bool:
    return "{%" in text or "{{" in text


def _template_in(text: str) -> str | dict[str, str]:
    """Return the `chat_template` entry of JSON text (one template or several with names), else the text itself."""
    try:
        document = json.loads(text)
    except ValueError:
        return text
    entry = document.get("chat_template") if isinstance(document, dict) else None
    if isinstance(entry, list):  # the form of older tokenizer_config.json files
        return {named["name"]: named["template"] for named in entry}
    return entry if isinstance(entry, str | dict) else text
