"""Request bodies as pydantic models: their field types, and the one translation of validation errors to HTTP errors.

An error names the field, the limit and the value. An explicit null means the same as an absent field. Clients of other
servers send many fields that this server does not have. So an unknown field is ignored, unless it looks like a misspelt
one, or its value asks for something that this server does not support (`Body.unsupported`).
"""

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from pydantic import (
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Strict,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from ....common.errors import ClientError
from ....common.words import shortened, shown
from ...text.json_parts import find_excess

NEAR = 0.8
"""An unknown field with at least this difflib ratio to a known one is taken for a misspelling of it."""
NEAR_ELSEWHERE = 0.82
"""The same ratio for fields of other routes and objects (`elsewhere`). Higher, so that `max_input_tokens` is not taken
for `max_new_tokens`."""
MOST_COMPARED = 32
"""Most unknown names of one object that are compared with the known ones."""


class FieldError(ClientError):
    """One field of a request is wrong; `param` is its name."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param} {problem}")
        self.param = param
        self.problem = problem


@contextmanager
def fields_named(*names: tuple[str, str]) -> Iterator[None]:
    """Renames the field of a FieldError, for bodies that are translated to another dialect: the error then names the
    field that the client has sent. `names` are regular expressions for the beginning of a name, with their
    replacements.
    """
    try:
        yield
    except FieldError as error:
        for pattern, replacement in names:
            if re.match(pattern, error.param):
                raise type(error)(re.sub(pattern, replacement, error.param, count=1), error.problem) from None
        raise


class BodyError(ClientError):
    """The body as a whole is invalid: for example empty, or not a JSON object."""


def problem(text: str, field: str | None = None) -> PydanticCustomError:
    """Returns the error that a validator raises. If the validator checks a whole object, `field` is the wrong field in
    it.
    """
    return PydanticCustomError("problem", "{text}", {"text": text, "field": field})


class Body(BaseModel):
    """A JSON object of a request."""

    model_config = ConfigDict(frozen=True)

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Fields of other servers or routes, each with the values that would change nothing. Other values are refused."""
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Fields that belong to another object or route, with the error text that names it."""
    unknown_fields: ClassVar[Literal["ignored", "refused if similar", "refused"]] = "ignored"
    has_token_ids: ClassVar[bool] = False
    """Whether the body may have long lists of numbers."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, value: object) -> object:
        """Checks the names before the values: a misspelt field explains better than a missing one what is wrong."""
        if isinstance(value, dict) and (others := [name for name in value if name not in cls.__pydantic_fields__]):
            cls._refuse({name: value[name] for name in others if value[name] is not None})
        return value

    @classmethod
    def _refuse(cls, others: Mapping[str, object]) -> None:
        unknown = []
        for name, value in others.items():
            harmless = cls.unsupported.get(name)
            if harmless is None:
                unknown.append(name)
            elif value not in harmless:
                accepted = " or ".join(msgspec.json.encode(choice).decode() for choice in harmless)
                allowed = f"; only {accepted} is accepted" if harmless else ""
                raise problem(f"is not supported here (got {shown(value)}){allowed}", name)
        if cls.unknown_fields == "ignored":
            return
        for name in unknown[:MOST_COMPARED]:
            if name in cls.elsewhere:
                raise problem(cls.elsewhere[name], name)
            near = _similar_name(cls, shortened(name))
            if near is not None and near in cls.elsewhere:
                raise problem(
                    f"is not a field of this request: did you mean {near}, which {cls.elsewhere[near]}?", name
                )
            if near is not None:
                raise PydanticCustomError("misspelt", "misspelt", {"field": shortened(name), "near": near})
            if cls.unknown_fields == "refused":
                raise problem("is not a field of this request", shortened(name))


BodyT = TypeVar("BodyT", bound=Body)


@lru_cache(maxsize=1024)
def _similar_name(body: type[Body], name: str) -> str | None:
    known = sorted(body.model_fields.keys() | body.unsupported.keys())
    near = difflib.get_close_matches(name, known, n=1, cutoff=NEAR) or difflib.get_close_matches(
        name, sorted(body.elsewhere), n=1, cutoff=NEAR_ELSEWHERE
    )
    return near[0] if near else None


def parse_body(model: type[BodyT], body: bytes, vocab_size: int = 0) -> BodyT:
    """The checked fields of a JSON body; raises BodyError or FieldError."""
    return validate(model, decode_object(body, counts_numbers=not model.has_token_ids), vocab_size)


def _finite(literal: str) -> float:
    """A number with a fraction or an exponent. msgspec takes up to 17 us for one like 1e300, without a break; in a
    function of Python, other threads may run in between.
    """
    value = float(literal)
    if math.isinf(value):
        raise ValueError("number out of range")
    return value


_DECODER = msgspec.json.Decoder(float_hook=_finite)


def decode_object(body: bytes, *, counts_numbers: bool = True) -> dict[str, object]:
    """The JSON object in `body`; raises BodyError when it is anything else, or has too many parts (`find_excess`)."""
    if not body:
        raise BodyError("the body is empty; send a JSON object")
    if (excess := find_excess(body, counts_numbers=counts_numbers)) is not None:
        raise BodyError(f"the body has {excess}")
    try:
        value: object = _DECODER.decode(body)
    except msgspec.MsgspecError as error:
        raise BodyError(f"the body is not valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise BodyError(f"the body is not valid UTF-8: {error}") from None
    except RecursionError:
        raise BodyError("the body is nested too deeply") from None
    if not isinstance(value, dict):
        raise BodyError(f"the body must be a JSON object, not {shown(value)}")
    return value


def validate(model: type[BodyT], value: Mapping[str, object], vocab_size: int = 0, within: str = "") -> BodyT:
    """The checked fields of an object; `within` is its path in the body."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _field_error(error, vocab_size, within) from None


def validate_item(models: Mapping[str, type[BodyT]], value: object, within: str, default: str | None = None) -> BodyT:
    """Returns the checked fields of an object. Its `type`, or `default`, selects the model; `within` is its path in the
    body.
    """
    if not isinstance(value, dict):
        raise FieldError(within, f"must be an object, got {shown(value)}")
    kind = value.get("type") or default
    if not isinstance(kind, str) or kind not in models:
        raise FieldError(f"{within}.type", f"must be one of {', '.join(models)}, got {shown(kind)}")
    return validate(models[kind], value, within=within)


_EXPECTED = {
    "bool_type": "true or false",
    "string_type": "a string",
    "float_type": "a number",
    "finite_number": "a finite number",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
}


def _field_error(error: ValidationError, vocab_size: int, within: str = "") -> FieldError:
    """Converts the first of pydantic's errors to a FieldError with the wording of this API."""
    first = error.errors(include_url=False)[0]
    kind, value, context = first["type"], first["input"], first.get("ctx", {})
    path = _path(first["loc"], within)
    prefix = f"{path}." if path else ""
    name = path if context.get("field") is None else prefix + context["field"]
    if kind == "problem":
        return FieldError(name, context["text"])
    if kind == "misspelt":
        return FieldError(name, f"is not a field of this request: did you mean {prefix}{context['near']}?")
    if kind == "missing" or (value is None and kind in ("string_type", "list_type") and not path.endswith("]")):
        return FieldError(name, "is required")
    if kind == "extra_forbidden":
        return FieldError(name, "is not supported by this server")
    if kind == "too_short":
        return FieldError(name, "is required and must not be empty")
    if kind == "too_long":
        return FieldError(name, f"holds {len(value)} items; at most {context['max_length']} are allowed")
    if kind == "literal_error":
        kind = context["expected"].replace("'", '"')
    if kind == "int_type":  # only of token ids: `Integer` raises an error of its own
        return FieldError(name, _token_id_problem(value, vocab_size))
    if kind == "float_type" and type(value) is int:
        kind = "finite_number"  # too large for a float
    return FieldError(name, f"must be {_EXPECTED.get(kind, kind)}, got {shown(value)}")


def _path(location: tuple[int | str, ...], path: str = "") -> str:
    """Returns the path of a field, such as `sampling_params[1].top_p`, without pydantic's tags of unions. It is
    appended to `path`.
    """
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in (ONE, EACH):
            path += f".{shortened(part)}" if path else shortened(part)
    return path


@dataclass(frozen=True)
class Within:
    """The range of a number. With `above`, the number must be larger than `minimum`."""

    minimum: int
    maximum: int | None = None
    above: bool = False
    note: str = ""

    def _check(self, value: Any) -> Any:
        low, high = self.minimum, self.maximum
        if value < low or (high is not None and value > high) or (self.above and value == low):
            raise problem(self.refusal(value))
        return value

    def refusal(self, value: float) -> str:
        if self.maximum is None:
            limits = f"at least {self.minimum}{self.note}"
        elif self.above:
            limits = f"above {self.minimum} and at most {self.maximum}"
        else:
            limits = f"between {self.minimum} and {self.maximum}"
        return f"must be {limits}, got {shown(value)}"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        maximum = {} if self.maximum is None else {"maximum": self.maximum}
        return handler(core) | {"exclusiveMinimum" if self.above else "minimum": self.minimum} | maximum


def check_within(value: int, name: str, minimum: int, maximum: int, origin: str = "") -> int:
    """Raises FieldError if `value` is out of range; for ranges that depend on the request. `origin` is appended to the
    error and says where the limit comes from.
    """
    if not minimum <= value <= maximum:
        raise FieldError(name, Within(minimum, maximum).refusal(value) + (origin and f"; {origin}"))
    return value


@dataclass(frozen=True)
class Characters:
    """The length of a string: at least one character."""

    longest: int

    def _check(self, value: str) -> str:
        if not 0 < len(value) <= self.longest:
            raise problem(f"must have 1 to {self.longest} characters, got {len(value)}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(core) | {"minLength": 1, "maxLength": self.longest}


class FirstError:
    """Stops the validation of a list at its first wrong item. pydantic's own FailFast cannot be used, because it is not
    hashable, and annotations of union members must be.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return dict(handler(source), fail_fast=True)


def _integral(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if type(value) is not int:
        raise problem(f"must be an integer, got {shown(value)}")
    return value


def _array_of_ids(value: object) -> object:
    if not isinstance(value, list):
        raise problem(f"must be an array of token ids, got {shown(value)}")
    return value


ValueT = TypeVar("ValueT")

Boolean = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
Number = Annotated[float, Strict(), AllowInfNan(False)]
Integer = Annotated[int, BeforeValidator(_integral)]
"""An integer, which may be written as 1.0: some languages have no other numbers."""
TokenIds = Annotated[list[Annotated[int, Strict()]], FirstError(), BeforeValidator(_array_of_ids)]
"""Integers; `check_token_ids` compares them with the vocabulary."""

ONE, EACH = "<one>", "<each>"
"""Tags of unions, which `_path` leaves out."""
BY_LIST = Discriminator(lambda value: EACH if isinstance(value, list) else ONE)
OneOrEach = Annotated[Annotated[ValueT, Tag(ONE)] | Annotated[list[ValueT], FirstError(), Tag(EACH)], BY_LIST]
"""A value for all prompts of a call, or a list with one for each."""
TextOrParts = Annotated[Annotated[Text, Tag(ONE)] | Annotated[list[ValueT], FirstError(), Tag(EACH)], BY_LIST]
"""Text, or a list of its parts."""


def optional(description: str) -> Any:
    """A field that may be absent or null."""
    return Field(None, description=description)


@cache
def _ids_within(vocab_size: int) -> Any:
    return tuple[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)], ...]


def check_token_ids(values: list[int], name: str, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids as a tuple. Raises a FieldError with the index of the first id outside the vocabulary."""
    try:
        ids: tuple[int, ...] = msgspec.convert(values, _ids_within(vocab_size))
    except msgspec.ValidationError:
        index = next(index for index, value in enumerate(values) if not 0 <= value < vocab_size)
        raise FieldError(f"{name}[{index}]", _token_id_problem(values[index], vocab_size)) from None
    return ids


def _token_id_problem(value: object, vocab_size: int) -> str:
    return f"must be a token id (an integer from 0 to {vocab_size - 1}), got {shown(value)}"
