"""The characters that byte-level BPE writes bytes with."""


def _alphabet() -> dict[str, bytes]:
    """How byte-level BPE writes bytes in its vocabulary: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)}


BYTE_LEVEL = _alphabet()
