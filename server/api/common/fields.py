"""Reading one JSON object of a request, field by field, with errors that name the field, the limit and the value."""

import math
from collections.abc import Mapping

import msgspec

from ....configs.errors import ClientError
from ....configs.words import shown


class FieldError(ClientError):
    """One field of a request is wrong; `param` is its name."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param} {problem}")
        self.param = param


class BodyError(ClientError):
    """The body as a whole is not what the route takes."""


def decode_object(body: bytes) -> dict[str, object]:
    """The JSON object in `body`; raises BodyError when it is anything else."""
    if not body:
        raise BodyError("the body is empty; send a JSON object")
    try:
        value: object = msgspec.json.decode(body)
    except msgspec.MsgspecError as error:
        raise BodyError(f"the body is not valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise BodyError(f"the body is not valid UTF-8: {error}") from None
    except RecursionError:
        raise BodyError("the body is nested too deeply") from None
    if not isinstance(value, dict):
        raise BodyError(f"the body must be a JSON object, not {shown(value)}")
    return value


class Fields:
    """Typed access to the fields of one object. An absent field and an explicit null both read as None.

    It remembers which fields were asked for: those are the ones this server knows (server/api/common/field_names.py).
    """

    def __init__(self, values: Mapping[str, object], path: str = "") -> None:
        self._values = values
        self._path = path
        self.read: set[str] = set()

    def name(self, field: str) -> str:
        """The field as the client would write it: `sampling_params.top_p`."""
        return f"{self._path}.{field}" if self._path else field

    def raw(self, field: str) -> object:
        self.read.add(field)
        return self._values.get(field)

    def spelling(self, *names: str) -> str:
        """Which of several names of one field was given, the first that was; the last one where none was."""
        given = [name for name in names if self.raw(name) is not None]
        return given[0] if given else names[-1]

    @property
    def unread(self) -> list[str]:
        """Fields that were given and that nobody has asked for."""
        return [name for name, value in self._values.items() if value is not None and name not in self.read]

    def error(self, field: str, problem: str) -> FieldError:
        return FieldError(self.name(field), problem)

    def boolean(self, field: str, default: bool) -> bool:
        value = self.raw(field)
        return default if value is None else check_boolean(value, self.name(field))

    def integer(self, field: str, minimum: int, maximum: int | None = None) -> int | None:
        value = self.raw(field)
        return None if value is None else check_integer(value, self.name(field), minimum, maximum)

    def number(self, field: str) -> float | None:
        """Any finite number."""
        value = self.raw(field)
        return None if value is None else check_number(value, self.name(field))

    def number_within(
        self, field: str, minimum: float, maximum: float, *, default: float, above: bool = False
    ) -> float:
        """A number from `minimum` to `maximum`; with `above`, `minimum` itself is too small."""
        value = self.raw(field)
        return default if value is None else check_within(value, self.name(field), minimum, maximum, above)

    def string(self, field: str, longest: int) -> str | None:
        value = self.raw(field)
        return None if value is None else check_string(value, self.name(field), longest)

    def array(self, field: str, longest: int) -> list[object] | None:
        value = self.raw(field)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.error(field, f"must be an array, got {shown(value)}")
        if len(value) > longest:
            raise self.error(field, f"holds {len(value)} items; at most {longest} are allowed")
        return value

    def object(self, field: str) -> "Fields":
        """The nested object, empty when absent."""
        return as_fields(self.raw(field), self.name(field))


def as_fields(value: object, path: str) -> Fields:
    if value is None:
        return Fields({}, path)
    if not isinstance(value, dict):
        raise FieldError(path, f"must be an object, got {shown(value)}")
    return Fields(value, path)


def check_boolean(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise FieldError(name, f"must be true or false, got {shown(value)}")
    return value


def check_number(value: object, name: str) -> float:
    """Any finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FieldError(name, f"must be a number, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        raise FieldError(name, f"must be a finite number, got {shown(value)}") from None
    if not math.isfinite(number):
        raise FieldError(name, f"must be a finite number, got {shown(value)}")
    return number


def check_within(value: object, name: str, minimum: float, maximum: float, above: bool = False) -> float:
    number = check_number(value, name)
    if number < minimum or number > maximum or (above and number == minimum):
        limits = f"above {minimum:g} and at most {maximum:g}" if above else f"between {minimum:g} and {maximum:g}"
        raise FieldError(name, f"must be {limits}, got {shown(number)}")
    return number


def check_integer(value: object, name: str, minimum: int, maximum: int | None = None) -> int:
    """An integer, which may be written as 1.0: some languages have no other numbers."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise FieldError(name, f"must be an integer, got {shown(value)}")
    if value < minimum or (maximum is not None and value > maximum):
        limit = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise FieldError(name, f"must be {limit}, got {shown(value)}")
    return value


def check_string(value: object, name: str, longest: int) -> str:
    if not isinstance(value, str):
        raise FieldError(name, f"must be a string, got {shown(value)}")
    if not 0 < len(value) <= longest:
        raise FieldError(name, f"must have 1 to {longest} characters, got {len(value)}")
    return value


def check_token_ids(values: object, name: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids of the served vocabulary; the first wrong one is named by its index."""
    if not isinstance(values, list):
        raise FieldError(name, f"must be an array of token ids, got {shown(values)}")
    for index, value in enumerate(values):
        # `type(...) is int` also turns away bool, and is the cheap test for prompts of a million ids
        if type(value) is not int or not 0 <= value < vocab_size:
            raise FieldError(
                f"{name}[{index}]", f"must be a token id (an integer from 0 to {vocab_size - 1}), got {shown(value)}"
            )
    return tuple(values)
