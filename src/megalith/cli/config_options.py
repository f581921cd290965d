"""Command-line options made from the fields of a config dataclass.

A config dataclass states each option once: its name, its type, its default, and, in the docstring below the
field, its help text. `config_options` turns the fields into options of a command and passes their values to
the command, which builds the dataclass. The dataclass checks values at construction, so the command line and
Python raise the same errors.

The help text is the attribute docstring, read from the source with `ast`: a field needs no second text in
`field(metadata=...)`, and the API reference shows the same sentence.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_args, get_type_hints

import typer

Command = Callable[..., Any]


def config_options(
    parameter: str,
    config: type,
    *,
    flags: Mapping[str, str] | None = None,
    omit: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
    metavars: Mapping[str, str] | None = None,
    panels: Mapping[str, Collection[str]] | None = None,
    only_given: bool = False,
) -> Callable[[Command], Command]:
    """Replace a parameter of a command with one option for each field of a config dataclass."""
    # The command receives, as `parameter`, a dict of field name -> value for `config(**values)`. The options
    # take the place of the parameter in the order of the help. The command is called with keyword arguments.
    # panels: groups of the help -> their fields, of this class or of others.
    flags, metavars = flags or {}, metavars or {}
    known = {field.name: None if field.default is MISSING else field.default for field in fields(config)}
    unknown = {*flags, *omit, *(defaults or {}), *metavars} - known.keys()
    if unknown:
        raise ValueError(f"{config.__name__} has no field {', '.join(sorted(unknown))}")

    arguments: dict[str, str] = {}
    options = []
    panel_of = {name: panel for panel, names in (panels or {}).items() for name in names}
    # An option of a field that is a text or a list of texts may be repeated.
    types, texts = get_type_hints(config), field_docstrings(config)
    repeated = {name for name, kind in types.items() if list[str] in get_args(kind)}
    types |= dict.fromkeys(repeated, list[str])
    for name, default in (known | dict(defaults or {})).items():
        if name in omit:
            continue
        if name not in texts:
            raise ValueError(f"{config.__name__}.{name} needs a docstring: it is the help of the option")
        flag = flags.get(name, "--" + name.replace("_", "-"))
        option = typer.Option(
            flag,
            help=texts[name],
            metavar=metavars.get(name, "<str>" if name in repeated else None),
            rich_help_panel=panel_of.get(name),
        )
        arguments[name] = flag.partition("/")[0].lstrip("-").replace("-", "_")
        options.append(
            inspect.Parameter(
                arguments[name],
                inspect.Parameter.KEYWORD_ONLY,
                default=None if only_given else default,
                annotation=Annotated[types[name] | None if only_given else types[name], option],
            )
        )

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**given: Any) -> Any:
            values = {name: given.pop(argument) for name, argument in arguments.items()}
            for name in repeated & values.keys():
                texts = values[name] or None
                values[name] = texts[0] if texts is not None and len(texts) == 1 else texts
            if only_given:
                values = {name: value for name, value in values.items() if value is not None}
            return command(**given, **{parameter: values})

        signature = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for each in signature.parameters.values():
            made = options if each.name == parameter else [each.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
            parameters.extend(made)
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def field_docstrings(config: type) -> dict[str, str]:
    """Return the docstring below each field of a class, on one line; empty texts without source files."""
    try:
        source = inspect.getsource(config)
    except OSError:  # an installation of compiled files only
        return dict.fromkeys(config.__annotations__, "")
    body = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for statement, after in zip(body.body, body.body[1:], strict=False):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts
