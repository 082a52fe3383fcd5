#!/usr/bin/env bash
# Install what the tests need besides Python: prometheus (with promtool), alertmanager, jq for the runbooks,
# openssl for certificates, ip and tc for hosts in network namespaces.
set -euo pipefail

missing=()
command -v prometheus >/dev/null && command -v promtool >/dev/null || missing+=(prometheus)
command -v alertmanager >/dev/null || command -v prometheus-alertmanager >/dev/null || missing+=(prometheus-alertmanager)
command -v jq >/dev/null || missing+=(jq)
command -v openssl >/dev/null || missing+=(openssl)
command -v ip >/dev/null && command -v tc >/dev/null || missing+=(iproute2)
[ ${#missing[@]} -eq 0 ] && exit 0

if ! command -v apt-get >/dev/null; then
    echo "test: ${missing[*]} not found and there is no apt-get; put prometheus, promtool, alertmanager, jq, openssl and iproute2 on the PATH" >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "test: ${missing[*]} not found; run as root once: apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 1
fi
echo "test: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
