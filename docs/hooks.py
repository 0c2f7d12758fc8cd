"""Fills documentation pages with tables that come from the abi, so that they cannot fall behind it.

A line `@layout descriptor.ATTEND` becomes the field table of `nearkv_hw.abi.descriptor.ATTEND`;
`@enum descriptor.Status` becomes the members of an enumeration with their meaning; `@config` the presets.
"""

import ast
import importlib
import inspect
import itertools
import re

from nearkv_hw.abi import PRESETS

DIRECTIVE = re.compile(r"^@(layout|enum|config)(?: (\w+)\.(\w+))?$", re.MULTILINE)


def on_page_markdown(markdown, **_):
    """Replace every directive of a page by its table."""
    return DIRECTIVE.sub(lambda match: TABLES[match[1]](match[2], match[3]), markdown)


def _layout(module, name):
    layout = getattr(importlib.import_module(f"nearkv_hw.abi.{module}"), name)
    rows = ["| bits | field | meaning |", "|---|---|---|"]
    for field in layout:
        low = layout.offset(field.name)
        high = low + field.width - 1
        label = (
            "reserved, zero" if field.reserved else f"`{field.name}`" + (", signed" if field.signed else "")
        )
        rows.append(f"| {high if high == low else f'{high}:{low}'} | {label} | {field.doc} |")
    return "\n".join(rows)


def _enum(module, name):
    source_module = importlib.import_module(f"nearkv_hw.abi.{module}")
    kind = getattr(source_module, name)
    meanings = _member_docs(source_module, name)
    rows = ["| value | name | meaning |", "|---|---|---|"]
    rows += [f"| {member.value} | `{member.name}` | {meanings.get(member.name, '')} |" for member in kind]
    return "\n".join(rows)


def _member_docs(module, name):
    """The string after each member's assignment, as the source has it."""
    tree = ast.parse(inspect.getsource(module))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        statement.targets[0].id: " ".join(following.value.value.split())
        for statement, following in itertools.pairwise(body)
        if isinstance(statement, ast.Assign)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
    }


def _config(*_):
    presets = {name: config.to_dict() for name, config in PRESETS.items()}
    fields = [field for field in next(iter(presets.values())) if field != "name"]
    rows = [
        "| field | " + " | ".join(f"`{name}`" for name in presets) + " |",
        "|---" * (len(presets) + 1) + "|",
    ]
    rows += [
        f"| `{field}` | " + " | ".join(str(p[field]) for p in presets.values()) + " |" for field in fields
    ]
    return "\n".join(rows)


TABLES = {"layout": _layout, "enum": _enum, "config": _config}
