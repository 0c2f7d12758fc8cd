"""Lets the site read this project's docstrings: `name : meaning` on one line, members beside parameters."""

import re

import griffe

HEADING = re.compile(r"^(Parameters|Members|Raises)\n-+$", re.MULTILINE)
ITEM = re.compile(r"^(\S[^:\n]*?) : (.*(?:\n(?:    .*|(?=\n    )))*)", re.MULTILINE)
SECTION_END = re.compile(r"\n\n(?=\S)")
NAMES = {"Members": "Attributes"}


class OneLineItems(griffe.Extension):
    """Turns each `name : meaning` into the form that numpy-style readers know."""

    def on_object(self, *, obj, **_):
        """Rewrite the docstring of an object, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = rewrite(obj.docstring.value)


def rewrite(text):
    """The docstring with its item sections in numpy's form."""
    match = HEADING.search(text)
    if match is None:
        return text
    end = SECTION_END.search(text, match.end())
    stop = end.start() if end else len(text)
    name = NAMES.get(match[1], match[1])
    body = ITEM.sub(lambda item: f"{item[1]}\n    {item[2]}", text[match.end() : stop])
    return f"{text[: match.start()]}{name}\n{'-' * len(name)}{body}{rewrite(text[stop:])}"
