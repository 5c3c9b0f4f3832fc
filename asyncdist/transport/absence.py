"""Absence: what the store says of a rank that takes no connection."""

from __future__ import annotations

import enum

__all__ = ["Absence"]


class Absence(enum.Enum):
    """Why a rank might not be there."""

    NONE = "nothing is known against its being there"
    LEFT = "it left in order"
    RESIGNED = "it could not be in this world after all; its own error says why"
    CUT_OFF = "its connection to the store has ended, without a goodbye"
    UNKNOWN = "the store cannot be asked whether it left in order"
