"""Keys and passwords: refused where they would be recorded, and masked in whatever is written or printed all the same.

They belong into the environment or into ~/.netrc, where this module finds those that must not appear anywhere else.
"""

from __future__ import annotations

import configparser
import contextlib
import functools
import netrc
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MASK = "***"
LEAST = 8
"""Shorter ones are not told from words."""
_NAME = re.compile(r"(^|[_.+~])(api_?key|key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
_IN_URL = re.compile(r"([a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE)
_ASSIGNED = re.compile(
    r"(\b[\w.-]*(?:api_?key|_key|token|secret|password|passwd|credentials?)['\"]?\s*[=:]\s*['\"]?)([^\s'\",}\]]{8,})",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """`text` without the keys and passwords that this process knows, and without those in addresses."""
    for secret in known_secrets():
        text = text.replace(secret, MASK)
    return _IN_URL.sub(rf"\1{MASK}@", text)


def redact_typed(text: str) -> str:
    """The same, and without what somebody assigned to a name such as wandb_key: for messages about a command line."""
    return _ASSIGNED.sub(rf"\1{MASK}", redact(text))


def refuse_secret(override: str) -> str | None:
    """What is wrong with an override that holds a key or a password, without it; None when there is none."""
    key = override.partition("=")[0]
    is_one = _NAME.search(key) and "=" in override
    if is_one or _IN_URL.search(override) or _holds_known(override) or "hydra.job.env" in key:
        return (
            f"{redact_typed(key)}: holds a key or a password, and settings are recorded; expected it in the "
            f"environment (WANDB_API_KEY) or in ~/.netrc"
        )
    return None


def secrets_in(values: Any, path: str = "") -> Iterator[str]:
    """The keys of a nested configuration whose values hold a secret, such as one taken from the environment."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, str) and (_IN_URL.search(value) or _holds_known(value)):
            yield here
        yield from secrets_in(value, here)


def _holds_known(text: str) -> bool:
    return any(secret in text for secret in known_secrets())


def known_secrets() -> list[str]:
    """Values of variables with such a name, and passwords of netrc and of wandb's settings; the longest first."""
    found = {value for name, value in os.environ.items() if _NAME.search(name) and not value.startswith(("/", "~"))}
    folder = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    found |= _stored(os.environ.get("NETRC"), folder, os.environ.get("HOME"))
    return sorted((value for value in found if len(value) >= LEAST), key=len, reverse=True)


@functools.lru_cache(maxsize=8)
def _stored(netrc_file: str | None, wandb_folder: str, home: str | None) -> frozenset[str]:
    found: set[str] = set()
    for name in [netrc_file] if netrc_file else ["~/.netrc", "~/_netrc"]:
        with contextlib.suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            found |= {login[2] for login in netrc.netrc(Path(name).expanduser()).hosts.values() if login[2]}
    settings = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(OSError, configparser.Error, UnicodeDecodeError):
        settings.read(Path(wandb_folder).expanduser() / "settings")
    found.add(settings.get("default", "api_key", fallback=""))
    return frozenset(found)
