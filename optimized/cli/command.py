"""How a function becomes a command: groups of options spread out, errors told in one line."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from optimized.cli.console import complain

BAD_INPUT, FAILURE = 2, 1  # exit codes

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def command(app: typer.Typer, name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command of ``app``; its docstring is the help text.

    A parameter whose type is a dataclass stands for one option per field (see ``optimized.cli.options``): they are
    declared once, there, and the function receives the dataclass; a default instance changes the options' defaults.
    ``--debug`` is added to every command.

    A ``ValueError`` or a missing file ends the command with exit code 2; every other error, a generation that failed
    among them, with 1.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        hints.pop("return", None)
        groups: dict[str, Any] = {key: hint for key, hint in hints.items() if dataclasses.is_dataclass(hint)}
        parameters = []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name in groups:
                parameters += _fields_as_parameters(groups[parameter.name], parameter.default)
            else:
                parameters.append(_keyword(parameter.name, hints[parameter.name], parameter.default))
        parameters.append(_keyword("debug", Debug, False))

        def run(**values: Any) -> None:
            debug = values.pop("debug")
            try:
                for key, group in groups.items():
                    values[key] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
                function(**values)
            except (typer.Exit, typer.Abort, BrokenPipeError):
                raise
            except Exception as error:
                if debug:
                    raise
                complain(_told(error))
                raise typer.Exit(BAD_INPUT if _is_bad_input(error) else FAILURE) from error

        run.__doc__ = function.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(name)(run)
        return function

    return register


def _fields_as_parameters(group: Any, default: Any) -> list[inspect.Parameter]:
    """One parameter per field; their defaults are those of ``default`` where the function gives one."""
    hints = get_type_hints(group, include_extras=True)
    defaults = group() if default is inspect.Parameter.empty else default
    return [
        _keyword(field.name, hints[field.name], getattr(defaults, field.name)) for field in dataclasses.fields(group)
    ]


def _keyword(name: str, hint: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _is_bad_input(error: Exception) -> bool:
    return isinstance(error, ValueError | FileNotFoundError)


def _told(error: Exception) -> str:
    expected = isinstance(error, ValueError | FileNotFoundError | ModuleNotFoundError) or not str(error)
    return str(error) or type(error).__name__ if expected else f"{type(error).__name__}: {error}"
