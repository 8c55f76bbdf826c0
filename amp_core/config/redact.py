"""Keys and passwords: refused in settings, which are recorded, and masked in whatever is written or printed.

They belong in the environment or in ~/.netrc; `docs/CLUSTERS.md` lists what counts as one. Masked are values that this
process knows (`known_secrets`), tokens of known form, and what stands where a URL or an assignment has a secret.
"""

from __future__ import annotations

import configparser
import contextlib
import functools
import json
import netrc
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from amp_core.config.files import visible

MASK = "***"
LEAST = 8
"""Shorter values are indistinguishable from words."""
_WORDS = r"api_?keys?|passwords?|passwd|passphrase|credentials?"
_NAME = re.compile(
    rf"({_WORDS}|secret|token|(^|[_.+~-])(key|pat|pass|auth|cookie|webhook(_url)?|sig|signature|sas)|_pwd|sshpass|_key_?id)"
    r"(_(b64|base64|json|data|value|base))?_?\d*$",
    re.IGNORECASE,
)
"""Names of settings and of variables that hold a secret."""
_LOGIN = re.compile(r"[\w+.-]+://[^/\s:@]*:(?!\d{1,5}[/?#])(\S*)@")
_PREFIX = r"gh[pousr]_|github_pat_|glpat-|hf_|wandb_v1_|npm_|pypi-|nvapi-|sk-|[rs]k_(?:live|test)_|xox[a-z]-|xapp-"
_PREFIX += r"|AKIA|ASIA|AIza|ya29\.|GOCSPX-|dapi|SG\.|\d{8,10}:AA|eyJ"
"""What keys of GitHub, GitLab, Hugging Face, wandb, OpenAI, Slack, AWS, Google and others and web tokens begin with."""
_RANDOM = r"(?=[A-Za-z+/=_.~-]{0,200}\d)(?=[0-9+/=_.~-]{0,200}[A-Za-z])[A-Za-z0-9+/=_.~-]"
_TO_NAME = rf"(\b[\w.-]{{0,60}}(?i:{_WORDS}|_key|AccountKey|token|secret|pwd|\bsig)['\"]?\s*[=:]\s*['\"]?)"
_ASSIGNED = re.compile(rf"{_TO_NAME}[^\s'\",}}\]]{{{LEAST},}}")
_FORM = re.compile(
    # Groups are kept, the rest is masked. A password may hold slashes and @, but https://host:80/a@b has none.
    rf"""
      (?:(?<![A-Za-z0-9])|(?<=\\[nrt])) (?:{_PREFIX}) [\w.-]{{0,80}}? [A-Za-z0-9]{{16,}} [\w-]* (?:\.[\w-]+)*
    | -----BEGIN[ ][A-Z ]{{0,30}}PRIVATE[ ]KEY-----
      (?:[\s\S]{{0,20000}}?-----END[ ][A-Z ]{{0,30}}PRIVATE[ ]KEY-----|[\s\S]*)
    | https://(?:hooks\.slack\.com|discord(?:app)?\.com/api/webhooks|[\w.-]+\.webhook\.office\.com)/[^\s"'<>]{{8,}}
    | (?<![A-Za-z0-9+.-])((?i:[a-z][a-z0-9+.-]{{0,30}})://)
      (?:[^/\s"<>:@]{{0,100}}:(?!\d{{1,5}}[/?\#])[^\s"<>]{{0,300}}|[^/\s"<>]{{1,300}})(?=@)
    | (?<![\w.+-])[\w.+-]{{1,64}}:(?!\d{{1,5}}[/?\#]|//)[^\s"'<>@]{{4,256}}(?=@[A-Za-z])(?!@sha256:)
    | ([?&;](?i:[\w-]{{0,30}}(?:token|api_?key|signature|secret|password|credential)|AWSAccessKeyId|key|sig|pwd|auth)=)
      [^&\s"'<>\#]{{4,}}
    | (\b(?i:Authorization['"]?\s*[:=]\s*['"]?(?:\w+\s+)?|Bearer\s+))[\w.~+/=-]{{16,}}
    | {_TO_NAME}{_RANDOM}{{16,}}
    """,
    re.VERBOSE,
)


def redact(text: str) -> str:
    """`text` without keys and passwords: those that this process knows, and what looks like one."""
    return _FORM.sub(_kept, _of_known(tuple(os.environb.items())).sub(MASK, text))


def redact_typed(text: str) -> str:
    """The same, and without whatever is assigned to a name such as wandb_key: for messages about a command line."""
    return _ASSIGNED.sub(_kept, redact(text))


def _kept(found: re.Match[str]) -> str:
    return "".join(filter(None, found.groups())) + MASK


def holds_secret(text: str) -> bool:
    """Whether a part of `text` would be masked."""
    return redact(text) != text


def masked(plain: Any) -> Any:
    """Nested plain data without keys and passwords, before a file format encodes them."""
    # One search for all: a search per name of a layer would take a hundred times as long.
    return _masked(plain) if holds_secret(json.dumps(plain, default=str, ensure_ascii=False)) else plain


def _masked(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {_masked(key): _masked(value) for key, value in plain.items()}
    if isinstance(plain, list):
        return [_masked(value) for value in plain]
    return redact(plain) if isinstance(plain, str) else plain


def shown(text: str) -> str:
    """A message for a terminal: no keys, no passwords, no endless names, and control characters made visible."""
    # In this order: a key with a control character, or at the cut, would not be found afterwards.
    return re.sub(r"(\S{200})\S{200,}", r"\1...", visible(redact(text)))


def refuse_secret(override: str) -> str | None:
    """What is wrong with an override that holds a key or a password, without it; None when there is none."""
    key, equals, _ = override.partition("=")
    if holds_secret(override) or (equals and _NAME.search(key)):
        return (
            f"{redact_typed(key)}: holds a key or a password, and settings are recorded; expected it in the "
            f"environment (WANDB_API_KEY) or in ~/.netrc"
        )
    return None


def secrets_in(values: Any) -> Iterator[str]:
    """The keys of a nested configuration whose values hold a secret, such as one taken from the environment."""
    items = [(here, key, "" if isinstance(v, dict | list) else str(v)) for here, key, v in items_of(values)]
    is_any = holds_secret("\n".join(f"{key}\n{text}" for _, key, text in items))  # one search for all
    for here, key, text in items:
        named = _NAME.search(key) and re.fullmatch(f"{_RANDOM}{{12,}}", text)
        if named or (is_any and holds_secret(f"{key}\n{text}")):
            yield here


def items_of(values: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """(full key, last part of it, value) of everything in nested plain data, outer ones first."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        here = f"{path}.{key}" if path else str(key)
        yield here, str(key), value
        yield from items_of(value, here)


def known_secrets() -> set[str]:
    """Values of variables with such a name, passwords of addresses in others, of netrc and of wandb's settings."""
    found = {value.strip() for name, value in os.environ.items() if _NAME.search(name) and not _is_path(value)}
    found |= {login[1] for value in os.environ.values() if (login := _LOGIN.match(value))}
    found |= {password for _, password in netrc_logins()} | {wandb_settings().get("api_key", "")}
    return {value for value in found if len(value) >= LEAST}


def _is_path(value: str) -> bool:
    """Whether the first folder of a path is there: one base64 key in 64 begins with a slash."""
    top = re.match(r"~[^/]*/[^/]+|/[^/]+", value)
    return top is not None and "\n" not in value and "\0" not in value and os.path.exists(os.path.expanduser(top[0]))


@functools.lru_cache(maxsize=8)
def _of_known(environ: tuple[tuple[bytes, bytes], ...]) -> re.Pattern[str]:
    """Finds the secrets of an environment as they are, and as JSON, YAML, HTML, a shell, Python and URLs write them."""
    whole = {text for secret in known_secrets() for text in (secret, unquote(secret))}
    # Each line of a secret is a secret: printed over several lines it may be indented.
    lines = whole | {line for text in whole for line in re.split(r"\\n|\s*\n", text) if len(line) >= LEAST}
    longest_first = sorted(lines, key=len, reverse=True)
    return re.compile("|".join("".join(map(_written, line)) for line in longest_first) or "(?!)")


def _written(letter: str) -> str:
    """A pattern of what an encoder makes of a letter: itself, doubled or escaped, an entity, its bytes, its number."""
    if letter.isascii() and (letter.isalnum() or letter in "_-."):
        return re.escape(letter)
    return rf"""(?:\\*{re.escape(letter)}{{1,2}}|&[#\w]{{1,6}};|(?:%[0-9A-Fa-f]{{2}})+|\\+\w{{1,5}}|'"'"'|\+|\s+)"""


def netrc_logins() -> list[tuple[str, str]]:
    """(host, password) of ~/.netrc, or of the file that NETRC names; none of a file that cannot be read."""
    found = []
    for name in [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]:
        with contextlib.suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            hosts = netrc.netrc(Path(name).expanduser()).hosts
            found += [(host, login[2]) for host, login in hosts.items() if login[2]]
    return found


def wandb_settings() -> dict[str, str]:
    """The values of wandb's settings file; none if it cannot be read."""
    settings = configparser.ConfigParser(interpolation=None)
    folder = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    with contextlib.suppress(OSError, configparser.Error, UnicodeDecodeError):
        settings.read(Path(folder).expanduser() / "settings")
    return dict(settings["default"]) if "default" in settings else {}


def mask_what_python_prints() -> None:
    """Mask this process's warnings and the tracebacks of uncaught exceptions, control characters made visible."""

    def uncaught(*problem: Any) -> None:
        print(visible(redact("".join(traceback.format_exception(*problem)))), file=sys.stderr, end="")

    warn = warnings.formatwarning
    warnings.formatwarning = lambda *args, **named: visible(redact(warn(*args, **named)))
    sys.excepthook = uncaught
    threading.excepthook = lambda args: uncaught(args.exc_type, args.exc_value, args.exc_traceback)
