"""Fields of a request that no parser has asked for: a mistake is refused with a hint, a stranger is ignored.

Clients of other servers send many fields that mean nothing here, and must not fail for it. A misspelt or misplaced one
is another matter: to ignore `temprature` would be to answer another question.
"""

import difflib
from collections.abc import Mapping

from ....configs.words import shortened
from .fields import Fields

NEAR = 0.8
"""How alike a name and a known one must be to count as misspelt (difflib's ratio)."""

MOST_COMPARED = 32


def refuse_mistakes(fields: Fields, elsewhere: Mapping[str, str], *, strict: bool = False) -> None:
    """Raise FieldError for an unread name that is in `elsewhere` (name -> what to say) or nearly one that was read.

    Call it when everything has been read. With `strict` every unread name is refused.
    """
    for name in fields.unread[:MOST_COMPARED]:
        if name in elsewhere:
            raise fields.error(name, elsewhere[name])
        near = difflib.get_close_matches(shortened(name), sorted(fields.read), n=1, cutoff=NEAR)
        if near:
            raise fields.error(shortened(name), f"is not a field of this request: did you mean {fields.name(near[0])}?")
        if strict:
            raise fields.error(shortened(name), "is not known to this server")
