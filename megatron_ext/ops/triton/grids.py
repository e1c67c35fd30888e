"""Sizes of grids that depend on how many tokens and pieces there may be, and on no length, as CUDA graphs want it."""

from __future__ import annotations


def tile_count(tokens: int, pieces: int, rows: int, size: int) -> int:
    """Programs for `pieces` pieces of at most `tokens` tokens in total, `rows` rows each, in tiles of `size` rows.

    Piece p has the tiles from floor(tokens before it * rows / size) + p on: as many as it needs or one more, and each
    at least one. `device.find_piece` finds them on the device; programs without a share return at once.
    """
    return tokens * rows // size + pieces
