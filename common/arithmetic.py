"""Integer division that rounds up."""


def ceil_div(value: int, divisor: int) -> int:
    """`value / divisor`, rounded up."""
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return ceil_div(value, multiple) * multiple
