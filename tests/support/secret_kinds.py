"""Keys and passwords of the usual kinds, all invented, and where bytes of them are looked for."""

from __future__ import annotations

import html
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote


@dataclass(frozen=True)
class Kind:
    """A kind of secret."""

    name: str
    value: str
    """What stands in the variable, or is typed."""
    core: str
    """The part of it that must be nowhere."""
    variable: str | None = None
    """Who has no known form is known by this variable alone; the others are known wherever they are typed."""


def _text(length: int, letters: str) -> str:
    return "".join(letters[(7 * place * place + 3 * place + len(letters)) % len(letters)] for place in range(length))


_HEX = "0123456789abcdef"
_ALNUM = "aZ3kQ8rT5mWx1LpV9cYb7DhN2jGs4F6"
_BASE64 = _ALNUM + "+/"


def _typed(name: str, value: str, core: str | None = None) -> Kind:
    return Kind(name, value, core or value)


def _named(name: str, variable: str, value: str, core: str | None = None) -> Kind:
    return Kind(name, value, core or value, variable)


PEM = "-----BEGIN RSA PRIVATE KEY-----\n" + "\n".join(_text(64, _BASE64[n:]) for n in (0, 5, 9))
PEM += "\n-----END RSA PRIVATE KEY-----\n"
JWT = f"eyJ{_text(33, _ALNUM)}.eyJ{_text(60, _ALNUM)}.{_text(43, _ALNUM)}"
KINDS = [
    _typed("GitHub", "ghp_" + _text(36, _ALNUM)),
    _typed("GitHub, fine-grained", f"github_pat_{_text(22, _ALNUM)}_{_text(59, _ALNUM)}"),
    _typed("GitLab", "glpat-" + _text(20, _ALNUM)),
    _typed("Hugging Face", "hf_" + _text(34, _ALNUM)),
    _typed("wandb, new", "wandb_v1_" + _text(60, _ALNUM)),
    _typed("OpenAI", "sk-" + _text(48, _ALNUM)),
    _typed("OpenAI, of a project", f"sk-proj-{_text(40, _ALNUM)}-{_text(20, _ALNUM)}_x"),
    _typed("Anthropic", f"sk-ant-api03-{_text(60, _ALNUM)}"),
    _typed("Slack", f"xoxb-{_text(12, '0123456789')}-{_text(24, _ALNUM)}"),
    _typed("Slack webhook", f"https://hooks.slack.com/services/T0AB/B0CD/{_text(24, _ALNUM)}", _text(24, _ALNUM)),
    _typed("AWS, id", "AKIA" + _text(16, "ABCDEFGHIJKLMNOP234567")),
    _typed("Google", "AIza" + _text(35, _ALNUM)),
    _typed("npm", "npm_" + _text(36, _ALNUM)),
    _typed("Stripe", "sk_live_" + _text(24, _ALNUM)),
    _typed("NVIDIA", "nvapi-" + _text(60, _ALNUM)),
    _typed("JWT", JWT),
    _typed("PEM", PEM, _text(64, _BASE64[5:])),
    _typed("address", "https://me:pa55w0rd-x1@host/x", "pa55w0rd-x1"),
    _typed("address, slash in the password", "https://me:pa/55w0rd-x2@host/x", "55w0rd-x2"),
    _typed("address, @ in the password", "s3://me:pa@55w0rd-x3@host/x", "55w0rd-x3"),
    _typed("address without a scheme", "me:pa/55w0rd-x4@host", "55w0rd-x4"),
    _typed("?token=", "https://host/x?a=1&token=" + _text(20, _ALNUM[3:]), _text(20, _ALNUM[3:])),
    _typed("sig=", f"https://host/x?sv=2022&sig={_text(30, _ALNUM[4:])}%3D", _text(30, _ALNUM[4:])),
    _typed("X-Amz-Signature", f"https://host/x?X-Amz-Signature={_text(64, _HEX)}", _text(64, _HEX)),
    _named("AWS", "AWS_SECRET_ACCESS_KEY", _text(40, _BASE64)),
    _named("wandb, 40 hex", "WANDB_API_KEY", _text(40, _HEX[1:])),
    _named("GITHUB_PAT", "GITHUB_PAT", _text(30, _ALNUM[6:])),
    _named("PGPASSWORD", "PGPASSWORD", "correct-horse-battery"),
    _named("MYSQL_PWD", "MYSQL_PWD", "staple=of:the mule,1"),
    _named("SLACK_WEBHOOK", "SLACK_WEBHOOK", "https://chat.example.org/hooks/" + _text(26, _ALNUM[7:])),
    _named("password of an address", "DATABASE_URL", "postgresql://me:pw-of-db-77@db/x", "pw-of-db-77"),
    _named("base64 that begins with /", "MY_SECRET", "/" + _text(42, _BASE64[2:]) + "="),
    _named("begins with ~", "OTHER_TOKEN", "~/" + _text(20, _ALNUM[8:])),
    _named("base64 with / and +", "THIRD_KEY", _text(9, _ALNUM[9:]) + "/+/" + _text(20, _ALNUM[9:])),
    _named("quotes, backslash, umlaut", "APP_PASSWORD", 'it\'s "a\\b" für mich'),
    _named("lines", "DEPLOY_KEY", "first-line-of-it-1\nsecond-line-of-it-2", "second-line-of-it-2"),
    _named("letters that act on a terminal", "ESC_SECRET", "abc\x1b[31mdef\x07ghij"),
]
ENVIRON = {kind.variable: kind.value for kind in KINDS if kind.variable}
VALUE_OF = {kind.name: kind.value for kind in KINDS}


def forms(core: str) -> set[bytes]:
    """How a program may have written it."""
    written = {core, core.replace("'", "''"), repr(core)[1:-1], json.dumps(core)[1:-1], html.escape(core)}
    written |= {json.dumps(core, ensure_ascii=False)[1:-1], quote(core), quote(core, safe="")}
    written |= {core.encode("unicode_escape").decode()}
    return {form.encode() for form in written}


def found_in(data: bytes) -> list[str]:
    """Names of the kinds of which there is something in `data`."""
    return [kind.name for kind in KINDS if any(form in data for form in forms(kind.core))]


def leaks(folder: Path, *, but: Path | None = None) -> list[str]:
    """Every kind in the name or the bytes of every file and folder."""
    found = []
    for path in sorted(folder.rglob("*")):
        if but is not None and path.is_relative_to(but):
            continue
        data = str(path.relative_to(folder)).encode(errors="surrogateescape") + b"\n"
        if path.is_symlink():
            data += str(path.readlink()).encode()
        elif path.is_file():
            data += path.read_bytes()
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as packed:  # what lies in it is not compressed
                    assert all(entry.compress_type == zipfile.ZIP_STORED for entry in packed.infolist())
        found += [f"{kind} in {path}" for kind in found_in(data)]
    return found
