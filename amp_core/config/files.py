"""Safe reading and writing of the files of run folders, which may be damaged, and which others may write to, too.

Reading is bounded and never waits. Writing is whole or not at all, on disk when it returns, and follows no link of
another user, not even one that takes the place of a folder meanwhile. Calls that change the file system go through
`os`, one by one, so that a test can stop between any two.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from yaml import SafeLoader

SMALL_FILE = 1 << 20
"""Bytes; a summary has 2 KB, a configuration 5 KB."""
YAML_FILE = 1 << 18
"""The YAML parser reads about 250 KB per second."""
_CHUNK = 1 << 26  # macOS refuses to write 2 GiB at once
_LEFT = re.compile(r"\.tmp-(?:(?:old-)?step_[0-9]{8,}-([0-9]+)|([0-9]+)-[0-9a-f]{16})")
"""Temporary folders of checkpoints and temporary files, with the process that made them."""
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link"}
_ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


def kind_of(path: Path) -> str:
    """What a path is, without following links: "a file", "a folder", "a pipe"; "" if it does not exist."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return ""
    return "a file" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a device")


def holds_checkpoint(run_dir: str | os.PathLike[str]) -> bool:
    return any(Path(run_dir).glob("checkpoints/step_*"))


def why_no_folder(path: Path) -> str | None:
    """Why a folder cannot be made, or not written to if it exists; None: it can."""
    while not path.exists() and path != path.parent:
        path = path.parent
    if not path.is_dir():
        return f"{path} is a file; expected a folder"
    if not os.access(path, os.W_OK | os.X_OK) or os.statvfs(path).f_flag & os.ST_RDONLY:
        return f"{path} is read-only; choose a folder that can be written"
    return None


def open_file(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file, to write of no link. OSError: anything else; no pipe or device is waited for."""
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    if flags & (os.O_WRONLY | os.O_RDWR):
        with opened(Path(path).parent) as folder:
            descriptor = os.open(os.path.basename(path), flags | os.O_NOFOLLOW, 0o666, dir_fd=folder)
    else:
        descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))
    return descriptor


def read_bytes(path: str | os.PathLike[str], limit: int = SMALL_FILE) -> bytes:
    """The content of a small file. OSError: it cannot be read; ValueError: it is longer than `limit`."""
    with os.fdopen(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"has {size:,} bytes, expected at most {limit:,}")
        return file.read(size)


def read_text(path: str | os.PathLike[str], limit: int = SMALL_FILE) -> str:
    """The same as text. Raises as `read_bytes`, and ValueError for an empty file and one that is no UTF-8."""
    content = read_bytes(path, limit)
    if not content.strip(b"\0 \n"):
        raise ValueError("is empty")
    try:
        return content.decode()
    except UnicodeDecodeError as problem:
        raise ValueError(f"is not UTF-8 (byte {problem.start})") from problem


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The object in a JSON file. Raises as `read_text`, and ValueError with its name if it holds none."""
    try:
        content = json.loads(read_text(path))
    except (RecursionError, ValueError) as problem:
        raise ValueError(f"{Path(path).name}: {problem}") from problem
    if not isinstance(content, dict):
        raise ValueError(f"{Path(path).name}: is not a JSON object")
    return content


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """The plain data of a YAML file. Raises as `read_text` and `parse_own_yaml`."""
    return parse_own_yaml(read_text(path, YAML_FILE))


def parse_own_yaml(text: str) -> Any:
    """The plain data of YAML that a run has written. ValueError: not YAML, or it would unfold to more than it is."""
    if len(re.findall(r"(?:^|[\s\[,{:-])[*&][\w-]", text)) > 20:
        raise ValueError("has more YAML anchors than any run writes")  # a few of them unfold to gigabytes
    try:
        return parse_yaml(text)
    except Exception as problem:  # the parser raises many kinds
        raise ValueError(getattr(problem, "problem", None) or str(problem) or type(problem).__name__) from problem


def parse_yaml(text: str) -> Any:
    """Plain data of YAML text; nothing is resolved, nothing executed. A damaged text raises the parser's own kinds."""
    return _Loader(text).get_single_data()


class _Loader(SafeLoader):
    """PyYAML's safe loader, which reads numbers as OmegaConf does, such as 1e-3, and leaves dates as text."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [(tag, expression) for tag, expression in resolvers if not tag.endswith("timestamp")]
        for first, resolvers in SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
        if len(set(keys)) < len(keys):
            twice = Counter(keys).most_common(1)[0][0]
            raise ValueError(f"found duplicate key {twice}, line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


_NUMBER = re.compile(r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9_]+)[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789."))


# --- writing ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A descriptor of a folder, for `dir_fd`. OSError: it is a link, and neither this user's own nor root's."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        if not os.path.islink(folder):
            raise
        if not is_own_link(folder):
            raise OSError(errno.ELOOP, "is a link that another user made; remove it", os.fspath(folder)) from None
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_own_link(path: Path) -> bool:
    """Whether a link was made by this user, or by root: in a folder that others may write to, anybody can make one."""
    return os.lstat(path).st_uid in (0, os.geteuid())


def write_whole(path: Path, *data: bytes | bytearray | memoryview) -> None:
    """Write a file atomically, replacing an existing one; on disk when this returns (OSError)."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{os.urandom(8).hex()}")
    try:
        write_file(temporary, *data)
        with opened(path.parent) as folder:
            os.rename(temporary.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def write_file(path: Path, *data: bytes | bytearray | memoryview) -> None:
    """Writes a new file and syncs its data, not its name. FileExistsError: the path exists."""
    with opened(path.parent) as folder:
        descriptor = os.open(path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
    try:
        for rest in map(memoryview, data):
            while rest:
                rest = rest[os.write(descriptor, rest[:_CHUNK]) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    with opened(folder) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot do it for a folder
                raise


def remove(path: Path) -> None:
    """Removes a path: a folder with its content, a link without its target."""
    with opened(path.parent) as folder:
        if stat.S_ISDIR(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(path.name, dir_fd=folder)
        else:
            os.unlink(path.name, dir_fd=folder)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of processes that have ended; a failure costs only space."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if match := _LEFT.fullmatch(name):
                try:
                    os.kill(int(match[1] or match[2]), 0)
                except (ProcessLookupError, OverflowError):
                    remove(folder / name)


def visible(text: str) -> str:
    """`text` with what would act on a terminal, or turn the order of letters around, shown as \\x1b and the like."""
    text = text.encode("utf-8", "backslashreplace").decode()  # names of files that are no UTF-8
    return _ACTING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
