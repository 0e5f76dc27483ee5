"""Checks of the inputs of a node by type, before any work is done.

ComfyUI compares types by name, and checks the range of a widget only if no link goes into it. So
another pack's node or a prompt over HTTP can pass any value to any input.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from numbers import Real

from comfy.model_management import get_torch_device

from .api import io
from .devices import OpenInput
from .error_text import LARGEST, about, described, one_line
from .input_types import TYPES
from .lazy import Later

vaes = Later("vae")


# An optional input that is None counts as not given: it gets the default of `execute`. An unknown
# input, such as a removed one in a saved workflow, is ignored: ComfyUI drops its value, but not a
# link into it.
def checked(execute: Callable[..., io.NodeOutput]) -> Callable[..., io.NodeOutput]:
    """Check all arguments of `execute`, below its `@classmethod`, against its node's schema."""
    signature = inspect.signature(execute)

    @functools.wraps(execute)
    def run(cls: type[io.ComfyNode], *args: object, **kwargs: object) -> io.NodeOutput:
        known = {name: value for name, value in kwargs.items() if name in signature.parameters}
        given = signature.bind(cls, *args, **known)
        schema = cls.define_schema()
        try:
            for each in schema.inputs:
                _check(each, given.arguments, is_list=schema.is_input_list)
            return execute(*given.args, **given.kwargs)
        except ValueError as error:
            text = one_line(str(error))
            if text == str(error):
                raise
            raise ValueError(text) from error

    return run


# ComfyUI reports the returned error once for each argument of `validate_inputs`, under the name of
# that input, and has no way to report it for one input only. An exception is no better: it is
# reported for an input of the next node. So the error says which inputs are wrong, and there is a
# check for each argument.
def check_text(checks: Mapping[str, Callable[[], object]]) -> bool | str:
    """Return True, or the errors of a node's texts in one line, for `validate_inputs`."""
    errors: dict[str, str] = {}
    for name, check in checks.items():
        try:
            check()
        except ValueError as error:
            text = str(error)
            errors[name] = text if text.startswith(name) else f"{name}: {text}"
    if not errors:
        return True
    text = one_line("; ".join(errors.values()))
    if len(errors) == len(checks):
        return text
    verb = "is" if len(errors) == 1 else "are"
    return f"{text} (only {' and '.join(errors)} {verb} wrong)"


def _check(spec: io.Input, given: dict[str, object], *, is_list: bool) -> None:
    name = spec.id
    if name not in given:
        return
    value = given[name]
    if value is None and spec.optional:
        del given[name]
        return
    with about(name):
        if not is_list:
            given[name] = _value(spec, value)
        elif isinstance(value, list):
            given[name] = [_value(spec, each) for each in value]
        else:
            raise ValueError(f"got {described(value)}; expected a list")


def _value(spec: io.Input, value: object) -> object:
    if isinstance(spec, OpenInput):
        return spec.check(value)
    if isinstance(spec, io.Combo.Input):
        return _choice(value, spec.options)
    if isinstance(spec, (io.Int.Input, io.Float.Input)):
        return _number(value, spec.min, spec.max, whole=isinstance(spec, io.Int.Input))
    if isinstance(spec, io.String.Input):
        return _text(value)
    if isinstance(spec, io.Boolean.Input):
        return _switch(value)
    check = functools.partial(TYPES[spec.get_io_type()], value)
    return vaes.retried(check, get_torch_device(), "the check of an input")


def _choice(value: object, options: list[str]) -> str:
    if isinstance(value, str) and value in options:
        return value
    known = ", ".join(options[:6]) + (f" and {len(options) - 6} more" if options[6:] else "")
    known = known or "(there are no choices)"
    raise ValueError(f"got {described(value)}; expected one of: {known}")


def _number(value: object, least: float, most: float, *, whole: bool) -> float:
    """Convert to int or float; an int may arrive as a float without a fraction."""
    # NaN is in no range.
    if isinstance(value, Real) and least <= value <= most and not (whole and value != int(value)):
        return int(value) if whole else float(value)
    kind = "a whole number" if whole else "a number"
    raise ValueError(f"got {described(value)}; expected {kind} from {least} to {most}")


def _text(value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST:
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"got {described(value)}; expected text")
    return value


def _switch(value: object) -> bool:
    if isinstance(value, Real) and value in (0, 1):
        return bool(value)
    raise ValueError(f"got {described(value)}; expected true or false")
