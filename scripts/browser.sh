#!/usr/bin/env bash
# Install what `make screenshots` needs besides the tests' tools: a Chromium to draw with, and a font.
set -euo pipefail

command -v chromium >/dev/null && exit 0
if ! command -v apt-get >/dev/null; then
    echo "screenshots: chromium not found and there is no apt-get; put one on the PATH" >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "screenshots: chromium not found; run as root once: apt-get install --no-install-recommends chromium fonts-dejavu-core" >&2
    exit 1
fi
echo "screenshots: installing chromium"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null
