"""A conversation to the one text that the model was trained on, by the model's own chat template.

The template comes from the model's folder and so from whoever published the model: it runs in a sandbox, and within
bounds of steps, size and time.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from prefixgate.gateway.template_sandbox import TemplateBoundError, TemplateSandbox

_SHOWN_CHARACTERS = 300


class TemplateRefusedError(Exception):
    """The chat template cannot be served, and why."""


class ChatTemplateError(Exception):
    """The template does not take these messages, and why. The text can be shown to the client."""


class ChatTemplate:
    """A compiled template. Thread safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile; ``special_tokens`` are the texts that the template may name, such as ``bos_token``.

        Raises TemplateRefusedError.
        """
        # The options and names are those that Hugging Face templates are written for.
        sandbox = TemplateSandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        sandbox.globals.update(special_tokens)
        sandbox.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        sandbox.globals |= {"tools": None, "documents": None, "add_generation_prompt": True}
        try:
            self._template = sandbox.compiled(source)
        except Exception as error:  # whatever a template's syntax can make the compiler raise
            raise TemplateRefusedError(f"chat_template: does not compile: {error}") from error
        self._sandbox = sandbox

    def render(self, messages: Sequence[Mapping[str, str]], *, max_characters: int, extra_characters: int = 0) -> str:
        """Render messages of ``role`` and ``content``, up to where the model's answer begins.

        ``extra_characters`` are let pass beside the limit, for messages that are longer than what they stand for.
        Raises ChatTemplateError for messages that the template does not take, for more than ``max_characters``, and
        for taking too long.
        """
        limit = max_characters + extra_characters
        try:
            text = self._sandbox.render(self._template, {"messages": messages}, limit=limit)
        except TemplateBoundError as error:
            raise ChatTemplateError(str(error)) from error
        except jinja2.TemplateError as error:
            reason = str(error.message)[:_SHOWN_CHARACTERS]
            raise ChatTemplateError(f"are refused by the chat template: {reason}") from error
        except Exception as error:  # a template is a program: it can raise anything, over messages it did not expect
            raise ChatTemplateError("cannot be rendered by the chat template") from error
        if len(text) > limit:
            raise ChatTemplateError(f"come to more than {max_characters} characters in the template")
        return text


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``: marks the assistant's part for training; here its body is all there is to it."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares a set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
