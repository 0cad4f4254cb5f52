"""Makes the small Debian root file system that tests of container boxes use where no registry can be reached.

    python tools/base_image.py [TAR]

It holds Python, pytest, git, the usual commands and a user `agent` (uid 1000). The packages come from the mirrors that
this host's own apt uses, unpacked by `mmdebstrap`; the same recipe on the same day gives the same tar. Needs root or
user namespaces. A tar that the same recipe has made is kept.
"""

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TAR = Path.home() / ".cache" / "lego" / "base-image.tar"
NAME = "localhost/lego-base:1"
"""What tests call the image."""
PACKAGES = (
    "base-files", "base-passwd", "dash", "bash", "coreutils", "findutils", "grep", "sed", "gawk", "tar", "gzip",
    "diffutils", "procps", "util-linux", "patch", "python3", "git", "python3-pytest", "libstdc++6",
    "libc-bin", "ca-certificates",
)  # fmt: skip
MERGED_USR = Path("/usr/share/mmdebstrap/hooks/merged-usr")
POCKETS = ("", "-updates", "-security")
"""Suites of one Debian release."""
OPTIONS = ("--variant=extract", "--format=tar", "--skip=output/dev")
# `extract` unpacks and runs no package's own scripts, so what those would make is made here.
HOOK = """set -eu
cd "$1"
cp usr/share/base-passwd/passwd.master etc/passwd
cp usr/share/base-passwd/group.master etc/group
echo 'agent:x:1000:1000::/home/agent:/bin/bash' >> etc/passwd
echo 'agent:x:1000:' >> etc/group
mkdir -p home/agent
chown 1000:1000 home/agent
ln -sf gawk usr/bin/awk
ln -sf python3 usr/bin/python
echo '127.0.0.1 localhost' > etc/hosts
echo box > etc/hostname
: > etc/resolv.conf
chmod 644 etc/hosts etc/hostname etc/resolv.conf
rm -rf usr/share/doc usr/share/man usr/share/info usr/share/locale etc/apt/sources.list* var/lib/dpkg/info
# A tar's rounded times would make ordinary bytecode stale.
chroot . python3 -m compileall -q --invalidation-mode checked-hash /usr/lib/python3*
chroot . ldconfig
rm -rf var/cache/ldconfig
"""


def say(words: str) -> None:
    """Progress, for people."""
    print(f"base image: {words}", file=sys.stderr, flush=True)


def codename() -> str:
    """This host's Debian release."""
    return platform.freedesktop_os_release().get("VERSION_CODENAME", "")


def sources(release: str) -> list[str]:
    """The `deb` lines of this host's apt for its own release; exits where there are none."""
    wanted = {release + pocket for pocket in POCKETS}
    fields = "$(REPO_URI) $(RELEASE) $(COMPONENT)"
    command = ["apt-get", "indextargets", "--format", fields, "Created-By: Packages"]
    rows = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True).stdout.splitlines()
    lines = [f"deb {row}" for row in dict.fromkeys(rows) if row.split()[1] in wanted]
    if not lines:
        raise SystemExit(f"apt knows no packages of {release or 'this release'} yet: run `apt-get update` as root")
    return lines


def recipe(release: str) -> str:
    """A digest of what the image is made from; the packages' versions are not in it."""
    parts = (release, platform.machine(), *OPTIONS, *PACKAGES, HOOK)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def command(release: str, hook: Path, tar: Path) -> list[str]:
    """The call that makes the tar."""
    merged = f"--hook-dir={MERGED_USR}"
    return [
        *("mmdebstrap", *OPTIONS, merged, f"--include={','.join(PACKAGES)}", f'--extract-hook=sh {hook} "$1"'),
        *(release, str(tar), *sources(release)),
    ]


def make(tar: Path, release: str) -> None:
    """Makes the tar under another name first, so that a broken run leaves none."""
    if shutil.which("mmdebstrap") is None or not MERGED_USR.is_dir():
        raise SystemExit("mmdebstrap is missing: run `apt-get install mmdebstrap` as root")
    with tempfile.TemporaryDirectory(dir=tar.parent, prefix=".base-image-") as place:
        Path(place).chmod(0o755)  # in a user namespace mmdebstrap is somebody else
        hook, part = Path(place, "hook.sh"), Path(place, "part.tar")
        hook.write_text(HOOK)
        epoch = {"SOURCE_DATE_EPOCH": "1700000000"}
        if subprocess.run(command(release, hook, part), env=os.environ | epoch, check=False).returncode:
            raise SystemExit("mmdebstrap failed; its last lines say why")
        part.replace(tar)


def ensure(tar: Path) -> None:
    """Makes the tar unless the same recipe has; two at once do the work once."""
    release = codename()
    tar.parent.mkdir(parents=True, exist_ok=True)
    side = tar.with_name(f"{tar.name}.recipe")
    with tar.with_name(f"{tar.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if tar.exists() and side.exists() and side.read_text() == recipe(release):
            return say(f"{tar} is there")
        side.unlink(missing_ok=True)
        say(f"making {tar} from packages of {release}; takes about a minute")
        make(tar, release)
        side.write_text(recipe(release))
    say(f"made {tar}, {tar.stat().st_size >> 20} MiB")


def main() -> None:
    """Exit status 0 when the tar is there."""
    parser = argparse.ArgumentParser(description="Makes the root file system that tests of container boxes use.")
    parser.add_argument("tar", nargs="?", type=Path, default=TAR, help=f"where it lies; {TAR} if not given")
    ensure(parser.parse_args().tar.absolute())


if __name__ == "__main__":
    main()
