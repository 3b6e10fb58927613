"""Both ends show that they know the run's token, without sending it, and that they speak the same version.

The token is drawn by rank 0 for one launch and reaches the other ranks through ``torch.distributed``, the server
through a pipe. Who does not know it is told nothing and heard no further. The client asks for the same proof: a port
that the server has left may be anybody's, and shares that strangers make up must not be trained with.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any, Final

from rex_ray.control.codec import Json

__all__ = ["PROTOCOL", "challenge", "greeting", "is_proof", "new_token", "nonce_of", "reply", "welcome"]

PROTOCOL: Final = 1
"""Rises when messages change; ends of two versions refuse one another."""

_NONCE_BYTES: Final = 16
_TOKEN_BYTES: Final = 32


def new_token() -> str:
    """Draw a launch's secret."""
    return secrets.token_hex(_TOKEN_BYTES)


def challenge() -> Json:
    """The server's first word: its version, and a number that is used once."""
    return {"rex_ray": PROTOCOL, "nonce": secrets.token_hex(_NONCE_BYTES)}


def greeting(token: str, challenged: str, rank: int) -> dict[str, Any]:
    """The client's answer: who it is, its proof, and a number of its own.

    Args:
        token: the run's.
        challenged: the server's number.
        rank: of the client.
    """
    return {
        "rex_ray": PROTOCOL,
        "rank": rank,
        "nonce": secrets.token_hex(_NONCE_BYTES),
        "proof": _proof(token, "client", challenged),
    }


def reply(token: str, challenged: str) -> Json:
    """The server's proof, or the other way around."""
    return {"proof": _proof(token, "server", challenged)}


def welcome(token: str, challenged: str, greeted: Json) -> str | None:
    """Judge a greeting; return the client's number, or None where it does not know the token.

    Args:
        token: the run's.
        challenged: the number that the client was sent.
        greeted: what it answered, anything.
    """
    number = nonce_of(greeted)
    return number if number is not None and is_proof(token, "client", challenged, greeted) else None


def nonce_of(said: Json) -> str | None:
    """Return the number in a challenge or a greeting of this version, None where there is none."""
    if not isinstance(said, dict) or said.get("rex_ray") != PROTOCOL:
        return None
    number = said.get("nonce")
    return number if isinstance(number, str) and len(number) == 2 * _NONCE_BYTES else None


def is_proof(token: str, whose: str, challenged: str, said: Json) -> bool:
    """Whether what was said proves knowledge of the token; takes the same time whatever was said."""
    proof = said.get("proof") if isinstance(said, dict) else None
    text = proof if isinstance(proof, str) and proof.isascii() else ""
    return hmac.compare_digest(_proof(token, whose, challenged), text)


def _proof(token: str, whose: str, challenged: str) -> str:
    # The end that speaks is part of it, so that a proof cannot be sent back to whoever made it.
    return hmac.new(token.encode(), f"{PROTOCOL} {whose} {challenged}".encode(), hashlib.sha256).hexdigest()
