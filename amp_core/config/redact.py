"""Keys and passwords: refused in settings, which are recorded, and masked in whatever is written or printed.

They belong in the environment or in ~/.netrc; `docs/CLUSTERS.md` lists what counts as one.
"""

from __future__ import annotations

import configparser
import contextlib
import functools
import json
import netrc
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from amp_core.config.files import visible

_NAMES = r"api_?key|accountkey|_key|_key_?id|password|passwd|passphrase|credentials?|secret|token|_pat|_pwd|signature"
_NAME = re.compile(rf"({_NAMES}|(^|[_.+~-]|ssh)(key|pass|auth|cookie|webhook(_url)?|sig|sas))_?\d*$", re.IGNORECASE)
"""Names of variables and settings whose values are secret."""
_PREFIX = r"gh[pousr]_|github_pat_|glpat-|hf_|wandb_v1_|npm_|pypi-|nvapi-|sk-|[rs]k_(?:live|test)_|xox[a-z]-|xapp-"
_PREFIX += r"|AKIA|ASIA|AIza|ya29\.|GOCSPX-|dapi|SG\.|\d{8,10}:AA|eyJ"
"""What keys of GitHub, GitLab, Hugging Face, wandb, OpenAI, Slack, AWS, Google and others and web tokens begin with."""
_TO_NAME = rf"\b[\w.-]{{0,60}}(?:{_NAMES})|[?&;](?:key|sig|auth)|\bAuthorization"
# Of a match the groups are kept. A password may hold slashes and @, but https://host:80/a@b has none.
_FORM = re.compile(
    rf"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))(?:{_PREFIX})[\w.-]{{0,80}}?[A-Za-z0-9]{{16,}}[\w-]*(?:\.[\w-]+)*"
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----(?:[\s\S]{0,20000}?-----END [A-Z ]{0,30}PRIVATE KEY-----|[\s\S]*)"
    r"|(https://hooks\.slack\.com/)[^\s\"'<>]{8,}"
    r"|(\b[A-Za-z][\w+.-]{0,30}://)(?:[^/\s\"<>:@]{0,100}:(?!\d{1,5}[/?#])[^\s\"<>]{0,300}|[^/\s\"<>]{1,300})(?=@)"
    r"|(?<![\w.+-])[\w.+-]{1,64}:(?!\d{1,5}[/?#]|//)[^\s\"'<>@]{4,256}(?=@[A-Za-z])(?!@sha256:)"
    rf"|((?i:(?:{_TO_NAME})['\"]?\s*[=:]\s*['\"]?(?:(?:Bearer|Basic)\s+)?|\bBearer\s+))"
    r"(?=[A-Za-z+/=%_.~-]{0,200}\d)(?=[\d+/=%_.~-]{0,200}[A-Za-z])[\w+/=%.~-]{16,}"  # sort_key=by_length is code
)


def redact(text: str) -> str:
    """`text` without keys and passwords: those that this process knows, and what looks like one."""
    known = _of_known(tuple(os.environb.items())).sub("***", text)
    return _FORM.sub(lambda found: "".join(filter(None, found.groups())) + "***", known)


def holds_secret(text: str) -> bool:
    return redact(text) != text


def masked(plain: Any) -> Any:
    """Nested plain data without keys and passwords, before a file format encodes them."""
    if isinstance(plain, str):
        return redact(plain)
    # One search for all: a search per name of a layer would take a hundred times as long.
    if not isinstance(plain, dict | list) or not holds_secret(json.dumps(plain, default=str, ensure_ascii=False)):
        return plain
    if isinstance(plain, dict):
        return {masked(key): masked(value) for key, value in plain.items()}
    return [masked(value) for value in plain]


def shown(text: str) -> str:
    """A message for a terminal: no keys, no passwords, no endless names, and control characters made visible."""
    # In this order: a key with a control character, or at the cut, would not be found afterwards.
    return re.sub(r"(\S{200})\S{200,}", r"\1...", visible(redact(text)))


def secrets_in(values: Any) -> Iterator[str]:
    """The keys of a nested configuration whose values hold a secret, such as one taken from the environment."""
    lines = {path: f"{key}={'' if isinstance(v, dict | list) else v}" for path, key, v in items_of(values)}
    if holds_secret("\n".join(lines.values())):  # one search for all
        yield from (path for path, line in lines.items() if holds_secret(line))


def items_of(values: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """(full key, last part of it, value) of everything in nested plain data, outer ones first."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        here = f"{path}.{key}" if path else str(key)
        yield here, str(key), value
        yield from items_of(value, here)


def known_secrets() -> set[str]:
    """Values of variables with such a name, but files; passwords of URLs in others, of netrc, of wandb's settings."""
    found = {value.strip() for name, value in os.environ.items() if _NAME.search(name)}
    # One base64 key in 64 begins with a slash, too.
    found -= {value for value in found if value[:1] in ("/", "~") and os.path.exists(os.path.expanduser(value))}
    found |= {login[1] for value in os.environ.values() if (login := re.match(r"[\w+.-]+://[^/\s:@]*:(\S*)@", value))}
    found |= {password for _, password in netrc_logins()} | {wandb_settings().get("api_key", "")}
    return {value for value in found if len(value) >= 8}  # shorter ones are indistinguishable from words


@functools.lru_cache(maxsize=8)
def _of_known(environ: tuple[tuple[bytes, bytes], ...]) -> re.Pattern[str]:
    """Finds the secrets of an environment as they are, and as JSON, YAML, HTML, a shell, Python and URLs write them."""
    longest_first = sorted({text for secret in known_secrets() for text in (secret, unquote(secret))}, key=len)[::-1]
    return re.compile("|".join("".join(map(_written, secret)) for secret in longest_first) or "(?!)")


def _written(letter: str) -> str:
    """A pattern of what an encoder makes of a letter: itself, doubled or escaped, an entity, its bytes, its number."""
    if letter.isascii() and (letter.isalnum() or letter in "_-."):
        return re.escape(letter)
    return rf"""(?:\\*{re.escape(letter)}{{1,2}}|&[#\w]{{1,6}};|(?:%[0-9A-Fa-f]{{2}})+|\\+\w{{1,5}}|'"'"'|\+|\s+)"""


def netrc_logins() -> list[tuple[str, str]]:
    """(host, password) of ~/.netrc, or of the file that NETRC names; none if it cannot be read."""
    with contextlib.suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
        hosts = netrc.netrc(os.environ.get("NETRC") or os.path.expanduser("~/.netrc")).hosts
        return [(host, password) for host, (_, _, password) in hosts.items() if password]
    return []


def wandb_settings() -> dict[str, str]:
    """The values of wandb's settings file; none if it cannot be read."""
    settings = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(configparser.Error, UnicodeDecodeError):
        settings.read(Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb", "settings").expanduser())
    return dict(settings["default"]) if "default" in settings else {}
