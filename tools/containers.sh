#!/bin/sh
# Installs what tests of Podman and Docker boxes need on Debian, as root, and makes the image that they use.
# Does nothing, and quickly, when all is there. Versions are the distribution's.
set -eu
cd "$(dirname "$0")/.."

wanted="podman runc crun conmon catatonit uidmap netavark aardvark-dns docker.io iproute2 mmdebstrap"
command -v apt-get > /dev/null || { echo "containers: no apt-get here; install by hand: $wanted" >&2; exit 1; }
lists=$(find /var/lib/apt/lists -name '*_Packages*' -print -quit 2> /dev/null || true)
missing=""
for package in $wanted; do
    status=$(dpkg-query --show --showformat '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$status" = installed ] || missing="$missing $package"
done
if [ -n "$missing" ] || [ -z "$lists" ]; then
    if [ "$(id -u)" != 0 ]; then
        echo "containers: as root: apt-get update && apt-get install --no-install-recommends$missing" >&2
        exit 1
    fi
    apt-get update -qq
fi
if [ -n "$missing" ]; then
    # shellcheck disable=SC2086 # a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends $missing
fi
exec python3 tools/base_image.py
