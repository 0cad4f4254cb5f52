"""Podman's own seccomp profile, less what no agent needs: as a file, which the service reads.

By the profile alone a program may make user namespaces, and in them process namespaces that a kill would not find,
and has all capabilities there over much of the kernel.
"""

import functools
import hashlib
import json
import secrets
from collections.abc import Mapping
from errno import ENOSYS, EPERM
from pathlib import Path
from typing import Any

from sandbox.base import SandboxError
from sandbox.seccomp import DENIED, NAMESPACE_FLAGS
from sandbox.state import private_folder, usual_folder

PLACES = (Path("/etc/containers/seccomp.json"), Path("/usr/share/containers/seccomp.json"))
CLONE = ("clone", "clone3")


def profile_path() -> Path:
    """Where the profile lies, for containers of this user. SandboxError where Podman's own is not to be found."""
    text = _text()
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = private_folder(usual_folder("podman")) / f"seccomp-{digest}.json"
    if not path.exists():
        draft = path.with_suffix(f".{secrets.token_hex(4)}")
        draft.write_text(text)
        draft.rename(path)
    return path


@functools.cache
def _text() -> str:
    for path in PLACES:
        if path.is_file():
            return json.dumps(narrowed(json.loads(path.read_text())))
    raise SandboxError(f"no seccomp profile of Podman's at {PLACES[1]}: apt-get install --reinstall podman")


def narrowed(profile: Mapping[str, Any]) -> dict[str, Any]:
    """A profile that also refuses all of `DENIED`, and new namespaces."""
    kept = [_without(rule) for rule in profile["syscalls"]]
    same = {"index": 0, "value": NAMESPACE_FLAGS, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    ours = [
        {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [same]},
        # It hides its flags behind a pointer; this answer makes C libraries fall back to clone.
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "args": [], "errnoRet": ENOSYS},
        {"names": sorted(DENIED), "action": "SCMP_ACT_ERRNO", "args": [], "errnoRet": EPERM},
    ]
    return {**profile, "syscalls": [*(rule for rule in kept if rule["names"]), *ours]}


def _without(rule: Mapping[str, Any]) -> dict[str, Any]:
    return {**rule, "names": [name for name in rule["names"] if name not in DENIED and name not in CLONE]}
