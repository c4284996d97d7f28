"""Text that is shown or kept: without secrets, and without what a terminal would take for a command.

Files, names and units may be a stranger's. `redacted` hides what a URL or a message holds of passwords, signatures and
tokens; `cleaned` shows control characters, line ends and tabs apart, in place of sending them.
"""

from __future__ import annotations

import re

HIDDEN = "***"
_LONG_USER = 16  # characters of a user's name from which on it is rather a token
# In any text, as in a connection string, and shorter names where they can only be a URL's parameters.
_NAMES = r"[\w.%-]*(?:signature|credential|token|secret|passw(?:or)?d|pwd|api[_-]?key|access[_-]?key)(?:[_-]?id)?"
_IN_TEXT = re.compile(rf"(?i)(?<![\w.%-])({_NAMES}=)([^\s&;,'\"<>)#]+)")
_IN_QUERY = re.compile(r"(?i)([?&;](?:sig|key|auth|code|sv|pass)=)([^\s&;,'\"<>)#]+)")
_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)([^\s/?#'\"<>]*)@")
# Control characters; marks that change the direction of what follows, or separate lines; halves of surrogate pairs.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def redacted(text: str) -> str:
    """The text with every secret hidden that its place gives away.

    >>> redacted("https://me:pass@lab.example/a.csv?X-Amz-Signature=12ab&part=1")
    'https://me:***@lab.example/a.csv?X-Amz-Signature=***&part=1'
    """
    text = _USER.sub(_hide_password, text)
    return _IN_QUERY.sub(rf"\1{HIDDEN}", _IN_TEXT.sub(rf"\1{HIDDEN}", text))


def has_secret(text: str) -> bool:
    """Whether there is something to hide."""
    return redacted(text) != text


def cleaned(text: str) -> str:
    r"""The text with control characters written out.

    >>> cleaned("m\x1b[2J")
    'm\\x1b[2J'
    """
    return _UNSAFE.sub(lambda found: _escaped(ord(found[0])), text)


def no_formula(text: str) -> str:
    """The text as a cell of a CSV file that a spreadsheet shows, and does not compute.

    >>> no_formula("=1+1"), no_formula("flow")
    ("'=1+1", 'flow')
    """
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def escaped_json(text: str) -> str:
    """JSON with the same characters as JSON escapes them."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _hide_password(found: re.Match[str]) -> str:
    scheme, user = found[1], found[2]
    name, separator, _ = user.partition(":")
    if separator:
        return f"{scheme}{name}:{HIDDEN}@"
    return f"{scheme}{HIDDEN if len(user) >= _LONG_USER else user}@"


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
