"""Keys and passwords: refused where they would be recorded, and masked in whatever is written or printed all the same.

They belong into the environment or into ~/.netrc, where this module finds those that must not appear anywhere else.
docs/CLUSTERS.md says exactly what counts as one.
"""

from __future__ import annotations

import configparser
import contextlib
import functools
import html
import json
import netrc
import os
import re
import shlex
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, unquote

from amp_core.config.files import visible

MASK = "***"
LEAST = 8
"""Shorter ones are not told from words."""
_WORDS = r"api_?keys?|passwords?|passwd|passphrase|credentials?"
_NAME = re.compile(rf"(^|[_.+~-])({_WORDS}|key|token|secret)$|(pass(word|wd|phrase)|secret|apikey)$", re.IGNORECASE)
"""Of a setting."""
_VARIABLE = re.compile(
    rf"({_WORDS}|secret|token|(^|_)(key|pat|pass|auth|cookie|webhook(_url)?|sig|signature|sas)|_pwd|sshpass|_key_?id)"
    r"(_(b64|base64|json|data|value|base))?_?\d*$",
    re.IGNORECASE,
)
"""Of a variable of the environment: more, since those are not ours."""
_FORM = re.compile(
    r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))(?:"  # also after an escaped end of a line
    r"gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}"  # GitHub, GitLab
    r"|hf_[A-Za-z0-9]{20,}|wandb_v1_\w{20,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{40,}|nvapi-[\w-]{20,}"
    r"|sk-[A-Za-z0-9]{20,}|sk-(?:proj|ant|svcacct|admin|or)-[\w-]{20,}|[rs]k_(?:live|test)_\w{16,}"  # OpenAI and others
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}"  # AWS, Google
    r"|xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{20,}|dapi[0-9a-f]{32}|SG\.[\w-]{16,}\.[\w-]{16,}|\d{8,10}:AA[\w-]{33}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]*"  # JSON web tokens
    r"|https://(?:hooks\.slack\.com|discord(?:app)?\.com/api/webhooks|[\w.-]+\.webhook\.office\.com)/[^\s\"'<>]{8,}"
    r")|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----(?:[\s\S]{0,20000}?-----END [A-Z ]{0,30}PRIVATE KEY-----|[\s\S]*)"
)
_PORT = r"(?!\d{1,5}[/?#])"
_IN_URL = re.compile(
    # A password may hold slashes and @, but https://host:80/a@b has none.
    rf"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{{0,30}}://)(?:[^/\s\"<>:@]{{0,100}}:{_PORT}[^\s\"<>]{{0,300}}|[^/\s\"<>]{{1,300}})@",
    re.IGNORECASE,
)
_LOGIN = re.compile(rf"[\w+.-]+://[^/\s:@]*:{_PORT}(\S*)@")
_IN_ADDRESS = re.compile(rf"(?<![\w.+-])[\w.+-]{{1,64}}:{_PORT}(?!//)[^\s\"'<>@]{{4,256}}@(?=[A-Za-z])(?!sha256:)")
_IN_QUERY = re.compile(
    r"([?&;](?:[\w-]{0,30}(?:token|api_?key|signature|secret|password|credential)|AWSAccessKeyId|key|sig|pwd|auth)=)"
    r"[^&\s\"'<>#]{4,}|((?<![\w.])sig=)[^&\s\"'<>#]{16,}",
    re.IGNORECASE,
)
_IN_HEADER = re.compile(
    r"(\b(?:Authorization['\"]?\s*[:=]\s*['\"]?(?:\w+\s+)?|Bearer\s+))[\w.~+/=-]{16,}", re.IGNORECASE
)
_TO_NAME = rf"(\b[\w.-]{{0,60}}(?:{_WORDS}|_key|AccountKey|token|secret|pwd)['\"]?\s*[=:]\s*['\"]?)"
_RANDOM = r"(?=[A-Za-z+/=_.~-]{0,200}\d)(?=[0-9+/=_.~-]{0,200}[A-Za-z])[A-Za-z0-9+/=_.~-]"
_ASSIGNED_RANDOM = re.compile(rf"{_TO_NAME}({_RANDOM}{{16,}})", re.IGNORECASE)
_ASSIGNED = re.compile(rf"{_TO_NAME}([^\s'\",}}\]]{{{LEAST},}})", re.IGNORECASE)


def redact(text: str) -> str:
    """`text` without keys and passwords: those that this process knows, and what has the form of one."""
    text = _of_known(tuple(known_secrets())).sub(MASK, text)
    text = _IN_URL.sub(rf"\1{MASK}@", _FORM.sub(MASK, text))
    text = _IN_ADDRESS.sub(f"{MASK}@", text)
    text = _IN_QUERY.sub(rf"\1\2{MASK}", text)
    return _ASSIGNED_RANDOM.sub(rf"\1{MASK}", _IN_HEADER.sub(rf"\1{MASK}", text))


def masked(plain: Any) -> Any:
    """Nested plain data without keys and passwords, before a file format encodes them: behind a \\n none is found."""
    texts = "\n".join(_texts_of(plain))
    return _masked(plain) if redact(texts) != texts else plain


def _texts_of(plain: Any) -> Iterator[str]:
    """Keys and values. Whether one holds a secret is seen by one look at all of them, a line each."""
    if not isinstance(plain, dict | list | tuple):
        yield str(plain)
        return
    for each in plain.items() if isinstance(plain, dict) else plain:
        yield from _texts_of(each)


def _masked(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {_masked(key): _masked(value) for key, value in plain.items()}
    if isinstance(plain, list):
        return [_masked(value) for value in plain]
    return redact(plain) if isinstance(plain, str) else plain


def redact_typed(text: str) -> str:
    """The same, and without what somebody assigned to a name such as wandb_key: for messages about a command line."""
    return _ASSIGNED.sub(rf"\1{MASK}", redact(text))


def shown(text: str) -> str:
    """A message for a terminal: no keys, no passwords, no endless names, and what would act on it made visible."""
    # In this order: the other way round a key with such a letter, or at the cut, would not be found.
    return re.sub(r"(\S{200})\S{200,}", r"\1...", visible(redact(text)))


def refuse_secret(override: str) -> str | None:
    """What is wrong with an override that holds a key or a password, without it; None when there is none."""
    key = override.partition("=")[0]
    is_one = _NAME.search(key) and "=" in override
    if is_one or holds_secret(override):
        return (
            f"{redact_typed(key)}: holds a key or a password, and settings are recorded; expected it in the "
            f"environment (WANDB_API_KEY) or in ~/.netrc"
        )
    return None


def secrets_in(values: Any, path: str = "") -> Iterator[str]:
    """The keys of a nested configuration whose values hold a secret, such as one taken from the environment."""
    is_clean = not holds_secret("\n".join(_texts_of(values)))
    for here, key, value in items_of(values, path):
        random = isinstance(value, str) and _NAME.search(key) and re.fullmatch(f"{_RANDOM}{{12,}}", value)
        is_leaf = not isinstance(value, (dict, list))
        if random or (not is_clean and (holds_secret(key) or (is_leaf and holds_secret(str(value))))):
            yield here


def items_of(values: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """(full key, last part of it, value) of everything in nested plain data, outer ones first."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        here = f"{path}.{key}" if path else str(key)
        yield here, str(key), value
        yield from items_of(value, here)


def holds_secret(text: str) -> bool:
    """Whether a part of `text` would be masked."""
    return redact(text) != text


def known_secrets() -> tuple[str, ...]:
    """Values of variables with such a name, and passwords of netrc and of wandb's settings; the longest first."""
    return _known(tuple(os.environb.items()))


@functools.lru_cache(maxsize=8)
def _known(environ: tuple[tuple[bytes, bytes], ...]) -> tuple[str, ...]:  # every line that is written asks for them
    found = {value.strip() for name, value in os.environ.items() if _VARIABLE.search(name) and not _is_path(value)}
    found |= {login[1] for value in os.environ.values() if (login := _LOGIN.match(value))}
    found |= {password for _, password in netrc_logins()} | {wandb_settings().get("api_key", "")}
    return tuple(sorted((value for value in found if len(value) >= LEAST), key=lambda value: (-len(value), value)))


def _is_path(value: str) -> bool:
    """Whether this is an ordinary path, such as that of a file with a key: it begins with a folder that is there.

    One base64 key in 64 begins with a slash.
    """
    if not value.startswith(("/", "~")):
        return False
    home, _, rest = value.partition("/")
    top = os.path.join(os.path.expanduser(home) if home else "/", rest.partition("/")[0])
    return "\n" not in value and "\0" not in value and len(top) < 4096 and os.path.exists(top)


@functools.lru_cache(maxsize=32)
def _of_known(known: tuple[str, ...]) -> re.Pattern[str]:
    """Finds secrets as they are, and as JSON, YAML, HTML, a shell, Python and addresses write them."""
    forms: set[str] = set()
    for secret in known:
        # Of several lines each is one, as they are written with a line's beginning before them.
        for one in {secret, " ".join(secret.split()), unquote(secret), *re.split(r"\\n|\s*\n", secret)}:
            forms |= {one, one.replace("'", "''"), shlex.quote(one)[1:-1] if "'" in one else one, visible(one)}
            forms |= {json.dumps(one)[1:-1], json.dumps(one, ensure_ascii=False)[1:-1], repr(one)[1:-1]}
            forms |= {one.replace("\\", "\\\\").replace("'", "\\'"), html.escape(one), html.escape(one, quote=False)}
            forms |= {quote(one), quote(one, safe=""), quote_plus(one)}
    usable = sorted((form for form in forms if len(form) >= LEAST), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, usable)) or "(?!)")


def netrc_logins() -> list[tuple[str, str]]:
    """(host, password) of ~/.netrc, or of the file that NETRC names; nothing of a file that cannot be read."""
    named = os.environ.get("NETRC")
    found = []
    for name in [named] if named else ["~/.netrc", "~/_netrc"]:
        with contextlib.suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            hosts = netrc.netrc(Path(name).expanduser()).hosts
            found += [(host, login[2]) for host, login in hosts.items() if login[2]]
    return found


def wandb_settings() -> dict[str, str]:
    """What wandb's file of settings holds; nothing if it cannot be read."""
    settings = configparser.ConfigParser(interpolation=None)
    folder = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    with contextlib.suppress(OSError, configparser.Error, UnicodeDecodeError):
        settings.read(Path(folder).expanduser() / "settings")
    return dict(settings["default"]) if "default" in settings else {}


def mask_what_python_prints() -> None:
    """Of this process: warnings, and the tracebacks of exceptions that nothing catches. Nothing in them acts on a
    terminal."""

    def uncaught(*problem: Any) -> None:
        print(visible(redact("".join(traceback.format_exception(*problem)))), file=sys.stderr, end="")

    warn = warnings.formatwarning
    warnings.formatwarning = lambda *args, **named: visible(redact(warn(*args, **named)))
    sys.excepthook = uncaught
    threading.excepthook = lambda args: uncaught(args.exc_type, args.exc_value, args.exc_traceback)
