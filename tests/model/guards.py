"""Guards of the Lua scripts, and the scripts without one of them.

A guard stands between the comment lines `-- guard NAME` and `-- end guard`.
"""

from __future__ import annotations

import hashlib
import re

from mlxq.protocol.scripts import NAMES, Script, script

_GUARD = r"^[ \t]*-- guard {name}\n.*?^[ \t]*-- end guard\n"
_ANY = re.compile(r"^[ \t]*-- guard (\S+)$", re.MULTILINE)


def guards() -> set[str]:
    """The names of all guards."""
    return {name for script_name in NAMES for name in _ANY.findall(script(script_name).source)}


def without(guard: str) -> dict[str, Script]:
    """The scripts that have this guard, without it."""
    pattern = re.compile(_GUARD.format(name=re.escape(guard)), re.MULTILINE | re.DOTALL)
    patched = {}
    for name in NAMES:
        source = script(name).source
        cut = pattern.sub("", source)
        if cut != source:
            patched[name] = Script(cut, hashlib.sha1(cut.encode()).hexdigest())
    return patched
