"""Constants of packed rows; packed_rows.py describes the format."""

GROUP = 128
"""Elements that share a scale."""
LARGEST = 448.0
"""Of e4m3."""
SMALLEST_SCALE = 1e-12
"""Scale of a group of zeros, which avoids a division by zero."""
