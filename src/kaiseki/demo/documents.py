"""Long texts that every Python installation has: its own standard library, in source form."""

from __future__ import annotations

import re
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec

MODULES = (
    "argparse", "ast", "bdb", "calendar", "cmd", "code", "codecs", "collections", "configparser",
    "contextlib", "copy", "csv", "dataclasses", "decimal", "difflib", "dis", "doctest", "enum",
    "fileinput", "fractions", "ftplib", "functools", "getopt", "gettext", "glob", "gzip", "heapq",
    "imaplib", "inspect", "ipaddress", "locale", "mailbox", "mimetypes", "modulefinder", "nntplib",
    "ntpath", "numbers", "optparse", "pathlib", "pdb", "pickle", "pickletools", "platform", "plistlib",
    "poplib", "posixpath", "pprint", "profile", "pstats", "py_compile", "pyclbr", "pydoc", "queue",
    "random", "sched", "selectors", "shelve", "shlex", "shutil", "smtplib", "socket", "socketserver",
    "ssl", "statistics", "string", "subprocess", "tabnanny", "tarfile", "tempfile", "textwrap",
    "threading", "timeit", "tokenize", "trace", "traceback", "types", "typing", "uuid", "warnings",
    "wave", "weakref", "webbrowser", "zipapp", "zipfile",
)  # fmt: skip
"""Modules written in Python; those that an installation lacks are passed over."""

LEAST_CHARACTERS = 4000
MOST_CHARACTERS = 8000
_TOP_LEVEL = re.compile(r"^(?:async def|def|class) ", re.MULTILINE)


def documents() -> list[str]:
    """Source texts, each from the start of a function or class on, of at least LEAST_CHARACTERS."""
    found = []
    for module in MODULES:
        text = _source(module)
        for match in _TOP_LEVEL.finditer(text):
            piece = text[match.start() : match.start() + MOST_CHARACTERS]
            if len(piece) >= LEAST_CHARACTERS:
                found.append(piece)
    return found


def _source(module: str) -> str:
    """The module's source, empty when there is none; the module is not imported."""
    spec = find_spec(module)
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        return ""
    return spec.loader.get_source(module) or ""
